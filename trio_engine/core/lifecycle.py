"""The life of a request: states x events, one table, and nothing else may move a status.

Pure. ``docs/architecture.md`` draws its diagram from ``TRANSITIONS``.
"""

from __future__ import annotations

import enum


class RequestStatus(enum.Enum):
    """Where a request is. A finished one is in no table of the core any more."""

    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"

    # Enum's own hashes the name, in Python, at every look into ``TRANSITIONS``.
    __hash__ = object.__hash__


class RequestEvent(enum.Enum):
    """What can happen to a request."""

    COMPILED = "compiled"
    """Its grammar is ready."""
    SCHEDULE = "schedule"
    """It gets a slot and its first blocks."""
    PREEMPT = "preempt"
    """Its blocks go to others; what it has computed is computed again."""
    STOP = "stop"
    """One of its tokens met a stop rule."""
    ABORT = "abort"
    """Its client or the engine ends it."""
    FAIL = "fail"
    """Its forward pass or its grammar failed, or its client no longer reads."""

    __hash__ = object.__hash__  # as above


FIRST_STATUSES = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_GRAMMAR)
"""Where an admitted request begins: the second if its output has a grammar."""

TRANSITIONS: dict[tuple[RequestStatus, RequestEvent], RequestStatus] = {
    (RequestStatus.WAITING_FOR_GRAMMAR, RequestEvent.COMPILED): RequestStatus.WAITING,
    (RequestStatus.WAITING_FOR_GRAMMAR, RequestEvent.ABORT): RequestStatus.FINISHED,
    (RequestStatus.WAITING_FOR_GRAMMAR, RequestEvent.FAIL): RequestStatus.FINISHED,
    (RequestStatus.WAITING, RequestEvent.SCHEDULE): RequestStatus.RUNNING,
    (RequestStatus.WAITING, RequestEvent.ABORT): RequestStatus.FINISHED,
    (RequestStatus.WAITING, RequestEvent.FAIL): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestEvent.PREEMPT): RequestStatus.PREEMPTED,
    (RequestStatus.RUNNING, RequestEvent.STOP): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestEvent.ABORT): RequestStatus.FINISHED,
    (RequestStatus.RUNNING, RequestEvent.FAIL): RequestStatus.FINISHED,
    (RequestStatus.PREEMPTED, RequestEvent.SCHEDULE): RequestStatus.RUNNING,
    # A token drawn before the preemption counts and may be the last (pipeline rule 5).
    (RequestStatus.PREEMPTED, RequestEvent.STOP): RequestStatus.FINISHED,
    (RequestStatus.PREEMPTED, RequestEvent.ABORT): RequestStatus.FINISHED,
    (RequestStatus.PREEMPTED, RequestEvent.FAIL): RequestStatus.FINISHED,
}


def next_status(status: RequestStatus, event: RequestEvent) -> RequestStatus:
    """The status after ``event``.

    Raises:
        AssertionError: the event cannot happen in this status; a bug of the core.
    """
    following = TRANSITIONS.get((status, event))
    if following is None:
        raise AssertionError(f"{event.value} cannot happen to a {status.value} request")
    return following
