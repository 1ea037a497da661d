"""Requests without a slot: who is next among those that may run, and who waits for something else.

Pure. Turns are first come, first served, or by priority, then arrival. A request that waits for its
grammar, or for a place for its adapter, lets others go before it and keeps its turn.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from trio_engine.core.lifecycle import RequestEvent, RequestStatus
from trio_engine.core.pending_grammars import PendingGrammars
from trio_engine.core.request import NO_SLOT
from trio_engine.core.request_queue import RequestQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_engine.config import SchedulingPolicy
    from trio_engine.core.plan import RowGrammar
    from trio_engine.core.request import Request


class WaitingRequests:
    """New and preempted requests. Iterating sorts them: for checks, not for steps.

    Args:
        policy: ``fcfs`` or ``priority``: what makes a turn.

    Attributes:
        pending_grammars: those that cannot run before their grammar is compiled.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.pending_grammars = PendingGrammars()
        self._has_priorities = policy == "priority"
        self._num_added = 0
        # Those that have never run, and those that have: these may go on while no new one starts.
        self._fresh = RequestQueue()
        self._preempted = RequestQueue()
        # Those whose turn came while all places for adapters were taken.
        self._held_up: dict[Request, None] = {}

    def __len__(self) -> int:
        return self.num_queued + self.num_held_up

    def __iter__(self) -> Iterator[Request]:
        queues = (self._fresh, self._preempted, self._held_up, self.pending_grammars)
        return iter(sorted(chain(*queues), key=attrgetter("turn")))

    @property
    def num_queued(self) -> int:
        """Those that wait for nothing but their turn."""
        return len(self._fresh) + len(self._preempted)

    @property
    def num_held_up(self) -> int:
        """Those that wait for their grammar, or for a place for their adapter."""
        return len(self.pending_grammars) + len(self._held_up)

    @property
    def any_queued(self) -> bool:
        """Whether any waits for nothing but its turn."""
        return bool(self._fresh or self._preempted)

    @property
    def any_preempted(self) -> bool:
        """Whether any has run before, and waits for nothing but its turn."""
        return bool(self._preempted)

    def add(self, request: Request) -> None:
        """Puts in a new request, and gives it its turn."""
        self._num_added += 1
        if self._has_priorities:
            request.turn = (request.priority, request.arrival_time, self._num_added)
        else:
            request.turn = (0, 0.0, self._num_added)
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self.pending_grammars.add(request)
        else:
            self._fresh.add(request)

    def add_preempted(self, request: Request) -> None:
        """Puts in one that has lost its slot; it keeps its turn."""
        self._preempted.add(request)

    def put_grammar(self, request: Request, grammar: RowGrammar) -> None:
        """A request has its grammar and may run; its turn is that of its coming."""
        self.pending_grammars.remove(request)
        request.grammar = grammar
        request.advance(RequestEvent.COMPILED)
        self._fresh.add(request)

    def peek(self, *, admit: bool) -> Request | None:
        """Whose turn it is among those that may run: all, or without ``admit`` the preempted."""
        preempted = self._preempted.peek()
        fresh = self._fresh.peek() if admit else None
        if fresh is None or (preempted is not None and preempted.turn < fresh.turn):
            return preempted
        return fresh

    def take(self, request: Request) -> None:
        """One of those that may run is going to run."""
        self._queue_of(request).remove(request)

    def hold_up(self, request: Request) -> None:
        """One of those that may run has no place for its adapter."""
        self.take(request)
        self._held_up[request] = None

    def release_held_up(self) -> None:
        """There is a place for an adapter: whose it is, turns say."""
        held_up, self._held_up = self._held_up, {}
        for request in held_up:
            self._queue_of(request).add(request)

    def end(self, request: Request) -> None:
        """Forgets a request that ends, wherever it waits."""
        if request in self._held_up:
            del self._held_up[request]
        elif request in self.pending_grammars:
            self.pending_grammars.end(request)
        else:
            self.take(request)

    def check_integrity(self) -> None:
        """Raises AssertionError unless all stand where they belong, and hold nothing."""
        for request in self:
            is_pending = request.status is RequestStatus.WAITING_FOR_GRAMMAR
            assert is_pending == (request in self.pending_grammars), f"{request} in waiting"
            assert request.status is not RequestStatus.RUNNING, f"{request} in waiting"
            assert not request.block_ids, f"{request} waits with blocks"
            assert request.slot == NO_SLOT, f"{request} waits with a slot"

    def _queue_of(self, request: Request) -> RequestQueue:
        return self._fresh if request.status is RequestStatus.WAITING else self._preempted
