"""A state machine for a whole engine: what its clients send, read and do not read.

Public kit; needs hypothesis. The engine is a ``MemoryEngine``, run as a guest under a mock clock:
each rule ends with all tasks blocked, and time passes only by a rule.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from trio_engine.config import EngineConfig
from trio_engine.errors import EngineDeadError
from trio_engine.testing.guest_run import GuestRun
from trio_engine.testing.memory_client import MemoryClient
from trio_engine.testing.memory_engine import MemoryEngine
from trio_engine.testing.promise_machine import (
    CLIENTS,
    FIRST,
    IDS,
    IDS_TO_ABORT,
    NUM_CLIENTS,
    OPTIONS,
    PROMPTS,
    ROWS,
    PromiseMachine,
)
from trio_engine.testing.promises import Promises, excuse_aborts, excuse_failures
from trio_engine.testing.strategies import malformed_frames
from trio_engine.wire.messages import AbortRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.engine_core import EngineCore

OUTBOX_LIMIT_BYTES = 5000
"""More than one turn adds for the three requests of a client: only who does not read is over it."""

LIMITS = st.fixed_dictionaries(
    {"shutdown_timeout_s": st.sampled_from([30.0, 0.0]), "num_blocks": st.integers(5, 8)},
    optional={
        "max_num_seqs": st.integers(1, 2),
        "pipeline_depth": st.just(1),
        "launches_ahead": st.just(True),
        "outbox_limit_bytes": st.just(OUTBOX_LIMIT_BYTES),
        "scheduling_policy": st.just("priority"),
    },
)

CALLS = st.sampled_from(
    [
        ("is_scheduler_paused", []),
        ("resume_scheduler", []),
        ("pause_scheduler", ["keep", False]),
        ("pause_scheduler", ["wait", False]),
        ("pause_scheduler", ["abort", True]),
        ("sleep", [1, "keep"]),
        ("sleep", [1, "abort"]),
        ("wake_up", []),
        ("reset_prefix_cache", [True]),
        ("no_such_method", []),
    ]
)

MAX_HELD_UP = 4
"""Messages of a client that are on the way at once, so that a turn adds only so much."""

MAX_UNANSWERED = 32
"""Calls of a client that wait at once, as all may be answered in one turn."""

TURN_BYTES = 24 * 1024
"""By how much an outbox may be over its limit: what one turn of the step loop adds at most."""

MAX_MOVES = 2000
"""Moves of the executor for what two clients may have asked; more would be without end."""


class EngineMachine(PromiseMachine):
    """An engine and two clients, between which messages may be held up and links may break.

    Either client may also read nothing for a while. ``teardown`` does what is left, then asks the
    engine to stop, which must have an end. Where an engine has ended, the next request begins a
    new one.

    Attributes:
        config: of the engine.
        engine: under test.
        guest: in which it runs.
        clients: what they wait for.
        has_ended: whether the engine's run has returned.
        death: the error that it ended with.
    """

    engine: MemoryEngine
    clients: list[MemoryClient]

    def __init__(self) -> None:
        super().__init__()
        self.guest: GuestRun | None = None

    @property
    def core(self) -> EngineCore:
        """The engine's core."""
        return self.engine.core

    @property
    def is_busy(self) -> bool:
        """Whether a request is open, so that there is something to disturb."""
        return not self.has_ended and bool(self.promises.open_lives())

    @property
    def has_work(self) -> bool:
        """Whether the executor could do something now."""
        return self.engine.forward.has_work

    @initialize(limits=LIMITS, first=FIRST)
    def start(self, limits: dict[str, Any], first: list[dict[str, Any]]) -> None:
        """Begins with a started engine, and some requests."""
        options = {"launches_ahead": False} | limits
        self._launches_ahead = options.pop("launches_ahead")
        self.config = EngineConfig(
            executor="kv-checking", max_model_len=20, block_size=4, **options
        )
        self._begin()
        for request in first:
            self.add(**request)

    # What clients do

    @rule(client=CLIENTS, request_id=IDS, prompt=PROMPTS, options=OPTIONS)
    def add(self, client: int, request_id: str, prompt: list[int], options: dict[str, Any]) -> None:
        """A request, under an id that its client does not use now."""
        if self.has_ended:
            self._end()
            self._begin()
        if not self.can_ask(client) or self.promises.find(client, request_id):
            return
        life = self.begin_life(client, request_id, prompt, options)
        is_ending = any(caller.unanswered[call_id] for caller, call_id in self._ending_calls)
        life.may_abort = self._is_stopping or is_ending
        life.may_fail = not self.clients[client].is_reading
        self.do(partial(self.clients[client].send, life.request))

    @precondition(lambda self: self.is_busy)
    @rule(client=CLIENTS, request_ids=IDS_TO_ABORT)
    def abort(self, client: int, request_ids: list[str]) -> None:
        """Requests of its own, live or ended; ids that it does not use mean nothing."""
        if not self.can_ask(client):
            return
        for request_id in request_ids:
            life = self.promises.find(client, request_id)
            if life is not None:
                life.awaits_abort = True
        self.do(partial(self.clients[client].send, AbortRequest(request_ids)))

    @rule(client=CLIENTS, method_and_args=CALLS, num_times=st.integers(1, 16))
    def call_repeatedly(
        self, client: int, method_and_args: tuple[str, list[Any]], num_times: int
    ) -> None:
        """The same utility call, one or several times."""
        for _ in range(min(num_times, MAX_UNANSWERED - self.clients[client].unanswered.total())):
            self.call(client, method_and_args)

    def call(self, client: int, method_and_args: tuple[str, list[Any]]) -> None:
        """A utility call, of a method that there is or is not."""
        if not self.can_ask(client):
            return
        caller, (method, args) = self.clients[client], method_and_args
        if "abort" in args:
            excuse_aborts(self.promises.open_lives())
        call_id = self.do(partial(caller.call, method, args))
        if "abort" in args:
            self._ending_calls.append((caller, call_id))

    @precondition(lambda self: self.is_busy)
    @rule(client=CLIENTS, frames=malformed_frames())
    def send_malformed(self, client: int, frames: list[bytes]) -> None:
        """What cannot be decoded: whose sender can be read is answered, and all else goes on."""
        if self.can_ask(client):
            self.do(partial(self.clients[client].send_malformed, frames))

    @precondition(lambda self: not self.has_ended)
    @rule(client=CLIENTS, num_moves=st.sampled_from([0, 2, 16]))
    def stop_reading(self, client: int, num_moves: int) -> None:
        """A client leaves unread what comes; beyond the limit its requests may end with ERROR."""
        self.clients[client].is_reading = False
        excuse_failures(self.promises.open_lives(client))
        self.work(num_moves)

    @precondition(lambda self: not all(client.is_reading for client in self.clients))
    @rule(client=CLIENTS)
    def resume_reading(self, client: int) -> None:
        """It reads all that is there, and whatever comes."""
        self.clients[client].is_reading = True
        self.do(lambda: None)

    # What becomes of messages on their way

    @precondition(lambda self: not self.has_ended)
    @rule(client=CLIENTS)
    def hold_up(self, client: int) -> None:
        """What a client sends does not arrive for a while."""
        self.engine.inputs[client].is_held_up = True

    @precondition(lambda self: any(peer.num_held_up for peer in self.engine.inputs))
    @rule(with_step=st.booleans())
    def let_through(self, with_step: bool) -> None:
        """All of it arrives together, and possibly at the same moment a result."""
        for client, peer in enumerate(self.engine.inputs):
            if peer.num_held_up:  # so much at once that it may overflow the outbox
                excuse_failures(self.promises.open_lives(client))
        self.do(partial(self._let_through, with_step=with_step))

    @precondition(lambda self: self.is_busy)
    @rule(client=CLIENTS, is_input=st.booleans())
    def break_link(self, client: int, is_input: bool) -> None:
        """A socket fails for good, which ends the engine; the other client is told."""
        self._has_missed.add(client)
        self._may_die = True
        links = self.engine.inputs if is_input else self.engine.outputs
        self.do(links[client].break_off)

    # What the executor does

    @precondition(lambda self: self.has_work)
    @rule(num_moves=st.integers(1, 8))
    def work(self, num_moves: int) -> None:
        """Plans are launched or collected, or commands are done, one after the other."""
        for _ in range(num_moves):
            if self.has_work:
                self.do(self.engine.forward.serve)

    @precondition(lambda self: self.has_work)
    @rule(row=ROWS)
    def fail(self, row: int) -> None:
        """A plan fails because of one of its rows."""
        excuse_failures(self.promises.open_lives())
        self.executor.next_faults = {"launch": row, "collect": row}
        self.work(num_moves=1)
        self.executor.next_faults.clear()

    @precondition(lambda self: self.is_busy and self.has_work)
    @rule()
    def break_down(self) -> None:
        """The executor fails for good, if it has a step to do."""
        self.executor.is_broken = self._may_die = True
        self.work(num_moves=1)
        self.executor.is_broken = False

    # What comes from outside

    @precondition(lambda self: not self.has_ended)
    @rule(seconds=st.sampled_from([0.5, 40.0]))
    def pass_time(self, seconds: float) -> None:
        """Deadlines pass; what a client has not read when the engine ends may be lost."""
        assert self.guest is not None
        self.guest.jump(seconds)
        self.do(lambda: None)
        if self.has_ended:
            self._has_missed |= {c.index for c in self.clients if not c.is_reading}
        elif self._is_stopping and seconds > self.config.shutdown_timeout_s:
            are_reading = all(client.is_reading for client in self.clients)
            assert not are_reading, "the drain outlives its deadline"

    # Without a precondition, as the first rule by name: see ``promise_machine``.
    @rule(lost=st.none() | CLIENTS)
    def ask_to_stop(self, lost: int | None) -> None:
        """As SIGTERM does: at first a drain, then an end, at which a client may be lost."""
        if not self.is_busy:
            return
        excuse_aborts(self.promises.open_lives())
        self._is_stopping = True
        self.do(partial(self.engine.proc.shutdown.request, "asked to"))
        if lost is not None and self.is_busy:
            self.break_link(lost, is_input=False)

    @precondition(lambda self: self.is_busy)
    @rule()
    def finish(self) -> None:
        """All that is left happens; then every request and call has had its end."""
        self.do(partial(self._let_through, with_step=False))
        for client in range(NUM_CLIENTS):
            self.resume_reading(client)
        for method in ("wake_up", "resume_scheduler"):
            self.call(0, (method, []))
            self._work_through()
        assert self.has_ended or not self._is_stopping, "the drain does not end"
        self.every_accepted_request_ends_in_exactly_one_terminal_event()
        if not self.has_ended:
            self.add(client=1, request_id="fresh", prompt=[1, 2], options={"max_tokens": 4})
            self._work_through()
            self.every_accepted_request_ends_in_exactly_one_terminal_event()

    # For rules

    def can_ask(self, client: int) -> bool:
        """Whether what a client sends now gets to the engine, sooner or later."""
        peer = self.engine.inputs[client]
        return not (self.has_ended or peer.is_broken or peer.num_held_up >= MAX_HELD_UP)

    def do(self, act: Callable[[], Any]) -> Any:
        """Does something inside, and lets everything go as far as it gets."""
        assert self.guest is not None
        result = self.guest.call(act)
        while any(client.has_mail for client in self.clients):
            self.guest.call(self._read)
        return result

    # Promises

    @invariant()
    def a_slow_client_costs_bounded_memory(self) -> None:
        """Whatever it asks for."""
        for outbox in self.core.outboxes:
            assert outbox.num_bytes <= self.config.outbox_limit_bytes + TURN_BYTES

    @invariant()
    def each_call_is_answered_once(self) -> None:
        """And nothing follows the news of the engine's death."""
        for client in self.clients:
            assert not client.strays, client.strays

    @invariant()
    def the_engine_dies_only_of_what_is_fatal(self) -> None:
        """Not of a plan that failed by one of its rows, nor of anything that a client sends."""
        assert self.guest is None or self.death is None or self._may_die, str(self.death)

    def every_accepted_request_ends_in_exactly_one_terminal_event(self) -> None:
        """Once all is done, or the engine's death is told; a second one is looked for all along."""
        for client in self.clients:
            if self.has_ended:
                self.do(client.forget_unread)
            if client.index in self._has_missed:
                continue
            assert client.is_told_dead == (self.death is not None), f"client {client.index}"
            if self.death is None:
                self.promises.check_every_life_is_over(client.index)
                assert not any(client.unanswered.values()), client.unanswered
        if not self.has_ended:
            self.check_nothing_is_held()

    def teardown(self) -> None:
        """``finish``, and an orderly stop, which needs no time where nothing is left."""
        if self.guest is None:
            return
        try:
            if not self.has_failed:
                self._end()
        finally:
            self.guest.close()

    # Inside

    def _begin(self) -> None:
        if self.guest is not None:
            self.guest.close()
        self.promises = Promises(self.run_alone)
        self.has_ended = False
        self.death: EngineDeadError | None = None
        self._is_stopping = self._may_die = False
        # Clients that may have lost outputs: their link broke, or they did not read at the end.
        self._has_missed: set[int] = set()
        # Calls that end all requests, by client and id.
        self._ending_calls: list[tuple[MemoryClient, int]] = []
        self.executor = self.make_executor(self.config, launches_ahead=self._launches_ahead)
        self.guest = GuestRun(self._main)
        self.guest.settle()
        self.clients = [MemoryClient(i, self.engine, self.promises) for i in range(NUM_CLIENTS)]

    def _end(self) -> None:
        self.finish()
        self.do(partial(self.engine.proc.shutdown.request, "asked to"))
        assert self.has_ended, "an engine without requests does not stop"

    async def _main(self) -> None:
        self.engine = MemoryEngine(self.config, self.executor, num_clients=NUM_CLIENTS)
        try:
            await self.engine.run()
        except EngineDeadError as error:
            self.death = error
        self.has_ended = True
        await trio.sleep_forever()

    def _let_through(self, *, with_step: bool) -> None:
        for peer in self.engine.inputs:
            peer.let_through()
        if with_step and self.has_work:
            self.engine.forward.serve()

    def _work_through(self) -> None:
        for _ in range(MAX_MOVES):
            if not self.has_work:
                return
            self.work(num_moves=1)
        raise AssertionError(f"no end after {MAX_MOVES} moves")

    def _read(self) -> None:
        for client in self.clients:
            client.read()
