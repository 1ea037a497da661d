"""A state machine for a whole engine: what its clients send, read and do not read.

Public kit; needs hypothesis. The engine is a ``MemoryEngine``, run as a guest under a mock clock:
each rule ends with all tasks blocked, and time passes only by a rule.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, invariant, rule
from trio.testing import wait_all_tasks_blocked

from trio_engine.config import EngineConfig
from trio_engine.errors import EngineDeadError
from trio_engine.testing.guest_run import GuestRun
from trio_engine.testing.memory_client import MemoryClient
from trio_engine.testing.memory_engine import MemoryEngine
from trio_engine.testing.promise_machine import CLIENTS, NUM_CLIENTS, ROWS, PromiseMachine
from trio_engine.testing.promises import excuse_aborts, excuse_failures
from trio_engine.testing.requests import make_request
from trio_engine.testing.strategies import REQUEST_IDS, malformed_frames, prompts, served_options
from trio_engine.wire.messages import AbortRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.engine_core import EngineCore

LIMITS = st.fixed_dictionaries(
    {"shutdown_timeout_s": st.sampled_from([30.0, 0.0]), "num_blocks": st.integers(5, 8)},
    optional={
        "max_num_seqs": st.integers(1, 2),
        "pipeline_depth": st.just(1),
        "launches_ahead": st.just(True),
        "outbox_limit_bytes": st.just(400),
    },
)

CALLS = st.sampled_from(
    [
        ("is_scheduler_paused", []),
        ("resume_scheduler", []),
        ("pause_scheduler", ["keep", False]),
        ("pause_scheduler", ["wait", False]),
        ("pause_scheduler", ["abort", True]),
        ("reset_prefix_cache", [True]),
        ("no_such_method", []),
    ]
)

TURN_BYTES = 4096
"""By how much an outbox may be over its limit: what one turn of the step loop adds."""

MAX_WORK = 2000


class EngineMachine(PromiseMachine):
    """An engine and two clients, either of which may read nothing for a while.

    ``teardown`` does what is left, then asks the engine to stop, which must have an end.

    Attributes:
        config: of the engine.
        engine: under test.
        guest: in which it runs.
        clients: what they wait for.
        has_ended: whether the engine's run has returned.
        death: the error that it ended with.
    """

    request_ids: Bundle[str] = Bundle("request_ids")
    engine: MemoryEngine
    clients: list[MemoryClient]

    def __init__(self) -> None:
        super().__init__()
        self.guest: GuestRun | None = None
        self.has_ended = False
        self.death: EngineDeadError | None = None
        self._is_stopping = False
        # Clients that may have lost outputs: they did not read while the engine ended.
        self._has_missed: set[int] = set()
        # Calls that end all requests, by client and id.
        self._ending_calls: list[tuple[MemoryClient, int]] = []

    @property
    def core(self) -> EngineCore:
        """The engine's core."""
        return self.engine.core

    @initialize(target=request_ids, limits=LIMITS)
    def start(self, limits: dict[str, Any]) -> str:
        """Begins with a started engine, and an id that nobody uses."""
        options = {"launches_ahead": False} | limits
        launches_ahead = options.pop("launches_ahead")
        self.config = EngineConfig(
            executor="kv-checking", max_model_len=20, block_size=4, **options
        )
        self.executor = self.make_executor(self.config, launches_ahead=launches_ahead)
        self.guest = GuestRun(self._main)
        self.guest.settle()
        self.clients = [MemoryClient(i, self.engine, self.promises) for i in range(NUM_CLIENTS)]
        return "nobody's"

    # What clients do

    @rule(
        target=request_ids,
        client=CLIENTS,
        request_id=st.sampled_from(REQUEST_IDS),
        prompt=prompts(),
        options=served_options(),
    )
    def add(self, client: int, request_id: str, prompt: list[int], options: dict[str, Any]) -> str:
        """A request, under an id that its client does not use now."""
        if not self.has_ended and not self.promises.find(client, request_id):
            life = self.promises.begin(make_request(request_id, prompt, client=client, **options))
            is_ending = any(caller.unanswered[call_id] for caller, call_id in self._ending_calls)
            life.may_abort = self._is_stopping or is_ending
            life.may_fail = not self.clients[client].is_reading
            self._do(partial(self.clients[client].send, life.request))
        return request_id

    @rule(client=CLIENTS, request_ids=st.lists(request_ids, min_size=1, max_size=3))
    def abort(self, client: int, request_ids: list[str]) -> None:
        """Requests of its own, live or ended; ids that it does not use mean nothing."""
        for request_id in request_ids:
            life = self.promises.find(client, request_id)
            if life is not None:
                life.awaits_abort = True
        self._do(partial(self.clients[client].send, AbortRequest(request_ids)))

    @rule(client=CLIENTS, method_and_args=CALLS)
    def call(self, client: int, method_and_args: tuple[str, list[Any]]) -> None:
        """A utility call, of a method that there is or is not."""
        if self.has_ended:
            return
        caller, (method, args) = self.clients[client], method_and_args
        if "abort" in args:
            excuse_aborts(self.promises.open_lives())
        call_id = self._do(partial(caller.call, method, args))
        if "abort" in args:
            self._ending_calls.append((caller, call_id))

    @rule(client=CLIENTS, frames=malformed_frames())
    def send_malformed(self, client: int, frames: list[bytes]) -> None:
        """What cannot be decoded: whose sender can be read is answered, and all else goes on."""
        if not self.has_ended:
            self._do(partial(self.clients[client].send_malformed, frames))

    @rule(client=CLIENTS)
    def stop_reading(self, client: int) -> None:
        """A client leaves unread what comes; beyond the limit its requests may end with ERROR."""
        self.clients[client].is_reading = False
        excuse_failures(self.promises.open_lives(client))

    @rule(client=CLIENTS)
    def resume_reading(self, client: int) -> None:
        """It reads all that is there, and whatever comes."""
        self.clients[client].is_reading = True
        self._do(_nothing)

    # What else happens

    @rule()
    def work(self) -> None:
        """A plan is launched or collected, or a command is done."""
        self._do(self.engine.forward.work)

    @rule()
    def work_through(self) -> None:
        """All plans that there are, and those that follow from them."""
        for _ in range(MAX_WORK):
            if not self.engine.forward.has_work:
                return
            self.work()
        raise AssertionError(f"no end after {MAX_WORK} moves")

    @rule(row=ROWS)
    def fail(self, row: int) -> None:
        """A plan fails because of one of its rows."""
        excuse_failures(self.promises.open_lives())
        self.executor.next_faults = {"launch": row, "collect": row}
        self.work()
        self.executor.next_faults.clear()

    @rule()
    def break_down(self) -> None:
        """The executor fails for good, if there is anything for it to do."""
        self.executor.is_broken = True
        self.work()
        self.executor.is_broken = False

    @rule(seconds=st.sampled_from([0.5, 40.0]))
    def pass_time(self, seconds: float) -> None:
        """Deadlines pass; what a client has not read when the engine ends may be lost."""
        assert self.guest is not None
        had_ended = self.has_ended
        self.guest.jump(seconds)
        self._do(_nothing)
        if self.has_ended and not had_ended:
            self._has_missed = {c.index for c in self.clients if not c.is_reading}

    @rule()
    def ask_to_stop(self) -> None:
        """As SIGTERM does: at first a drain, then an end."""
        excuse_aborts(self.promises.open_lives())
        self._is_stopping = True
        self._do(partial(self.engine.shutdown.request, "asked to"))

    @rule()
    def finish(self) -> None:
        """All that is left happens; then every request and call has had its end."""
        for client in range(NUM_CLIENTS):
            self.resume_reading(client)
        self.call(0, ("resume_scheduler", []))
        self.work_through()
        assert self.has_ended or not self._is_stopping, "the drain does not end"
        self.every_accepted_request_ends_in_exactly_one_terminal_event()
        if not self.has_ended:
            self.add(client=1, request_id="fresh", prompt=[1, 2], options={"max_tokens": 4})
            self.work_through()
            self.every_accepted_request_ends_in_exactly_one_terminal_event()

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

    def every_accepted_request_ends_in_exactly_one_terminal_event(self) -> None:
        """Once all is done, or the engine's death is told; a second one is looked for all along."""
        for client in self.clients:
            if self.has_ended:
                self._do(client.forget_unread)
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
                self.finish()
                self.ask_to_stop()
                assert self.has_ended, "an engine without requests does not stop"
        finally:
            self.guest.close()

    # Inside

    async def _main(self) -> None:
        self.engine = MemoryEngine(self.config, self.executor, num_clients=NUM_CLIENTS)
        try:
            await self.engine.run()
        except EngineDeadError as error:
            self.death = error
        self.has_ended = True
        await trio.sleep_forever()

    def _do(self, act: Callable[[], Any]) -> Any:
        """Does something inside, and lets everything go as far as it gets."""
        assert self.guest is not None
        return self.guest.call(self._turn, act)

    async def _turn(self, act: Callable[[], Any]) -> Any:
        result = act()
        await wait_all_tasks_blocked()
        while sum(client.read() for client in self.clients):
            await wait_all_tasks_blocked()
        return result


def _nothing() -> None:
    pass
