"""The one table that moves a request's status."""

from __future__ import annotations

from itertools import product

import pytest

from trio_engine.core.lifecycle import (
    FIRST_STATUSES,
    TRANSITIONS,
    RequestEvent,
    RequestStatus,
    next_status,
)

IMPOSSIBLE = sorted(
    set(product(RequestStatus, RequestEvent)) - TRANSITIONS.keys(),
    key=lambda pair: (pair[0].value, pair[1].value),
)


@pytest.mark.parametrize(("status", "event"), list(TRANSITIONS))
def test_each_transition_of_the_table_is_followed(
    status: RequestStatus, event: RequestEvent
) -> None:
    assert next_status(status, event) is TRANSITIONS[(status, event)]


@pytest.mark.parametrize(("status", "event"), IMPOSSIBLE)
def test_an_impossible_event_is_refused_by_both_names(
    status: RequestStatus, event: RequestEvent
) -> None:
    with pytest.raises(AssertionError, match=f"{event.value} cannot happen to a {status.value}"):
        next_status(status, event)


def test_nothing_happens_to_a_finished_request() -> None:
    assert RequestStatus.FINISHED not in {status for status, _ in TRANSITIONS}


def test_abort_and_failure_end_a_request_wherever_it_is() -> None:
    for status in set(RequestStatus) - {RequestStatus.FINISHED}:
        for event in (RequestEvent.ABORT, RequestEvent.FAIL):
            assert next_status(status, event) is RequestStatus.FINISHED


def test_a_preempted_request_may_end_by_its_token_in_flight_but_a_waiting_one_has_none() -> None:
    assert next_status(RequestStatus.PREEMPTED, RequestEvent.STOP) is RequestStatus.FINISHED
    assert (RequestStatus.WAITING, RequestEvent.STOP) not in TRANSITIONS


def test_every_status_is_reached_from_the_first_ones() -> None:
    reached = set(FIRST_STATUSES)
    for _ in RequestStatus:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert reached == set(RequestStatus)
