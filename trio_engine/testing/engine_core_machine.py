"""A state machine for the core: its moves in any order, against the promises to its clients.

Public kit, pure but for the executor; needs hypothesis.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from trio_engine.config import EngineConfig
from trio_engine.outputs import FinishReason
from trio_engine.requests import PauseMode
from trio_engine.testing.core_driver import CoreDriver
from trio_engine.testing.flaky_executor import FlakyExecutor
from trio_engine.testing.promises import Promises, excuse_aborts, excuse_failures
from trio_engine.testing.requests import make_core, make_request, run_alone
from trio_engine.testing.strategies import REQUEST_IDS, VOCAB_SIZE, prompts, served_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.requests import EngineCoreRequest
    from trio_engine.testing.core_driver import RequestLog
    from trio_engine.testing.promises import Life

NUM_CLIENTS = 2
CLIENTS = st.integers(0, NUM_CLIENTS - 1)
ROWS = st.integers(0, 2)

# Where requests get in each other's way comes first; an option that does not matter disappears.
LIMITS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4]),
        "max_model_len": st.sampled_from([8, 20]),
        "num_more_blocks": st.integers(0, 4),
    },
    optional={
        "max_num_seqs": st.integers(1, 3),
        "max_num_batched_tokens": st.sampled_from([8, 3, 1]),
        "pipeline_depth": st.just(1),
        "launches_ahead": st.just(True),
        "max_waiting_requests": st.integers(0, 2),
        "outbox_limit_bytes": st.just(400),
    },
)


class EngineCoreMachine(RuleBasedStateMachine):
    """An ``EngineCore``, a ``FlakyExecutor`` and two clients.

    The rules are the moves of clients, step loop and forward thread, one at a time and in any
    order that they could come in. What they leave, ``teardown`` does in the plainest order; then
    every request must have had its end, and nothing may be held.

    Attributes:
        config: of the engine.
        core: under test.
        executor: finds wrong blocks, rows and tokens, and fails when told.
        driver: makes the pipeline's moves.
        promises: what was asked, what came, and whether they agree.
    """

    request_ids: Bundle[str] = Bundle("request_ids")

    def __init__(self) -> None:
        super().__init__()
        self._is_started = False
        self._handled = sys.exception()

    @initialize(limits=LIMITS)
    def start(self, limits: dict[str, Any]) -> None:
        """Begins with a pool for one request of full length and a few blocks more."""
        options = {"launches_ahead": False, "num_more_blocks": 0} | limits
        launches_ahead = options.pop("launches_ahead")
        num_blocks = -(-options["max_model_len"] // options["block_size"])
        num_blocks += options.pop("num_more_blocks")
        self.config = EngineConfig(executor="kv-checking", num_blocks=num_blocks, **options)
        self.executor = self.make_executor(self.config, launches_ahead=launches_ahead)
        self.core = make_core(self.config, self.executor, num_clients=NUM_CLIENTS)
        self.promises = Promises(self.run_alone)
        self.pause_mode: PauseMode | None = None
        depth = self.config.pipeline_depth
        self.driver = CoreDriver(self.core, self.executor, pipeline_depth=depth)
        self._is_started = True

    # To override

    def make_executor(self, config: EngineConfig, *, launches_ahead: bool) -> FlakyExecutor:
        """The executor that the core drives."""
        return FlakyExecutor(config, launches_ahead=launches_ahead, vocab_size=VOCAB_SIZE)

    def run_alone(self, request: EngineCoreRequest) -> RequestLog:
        """The oracle of a request's tokens and end."""
        return run_alone(request, max_model_len=self.core.max_model_len, vocab_size=VOCAB_SIZE)

    # Moves of clients

    @rule(
        target=request_ids,
        client=CLIENTS,
        request_id=st.sampled_from(REQUEST_IDS),
        prompt=prompts(),
        options=served_options(),
    )
    def add(self, client: int, request_id: str, prompt: list[int], options: dict[str, Any]) -> str:
        """A request, under an id that may be free, live, or ended without its client's knowing."""
        life = self.promises.begin(make_request(request_id, prompt, client=client, **options))
        is_full = self.core.outboxes[client].is_full
        statistics, num_live = self.core.statistics(), self.num_live
        limit = self.config.max_waiting_requests
        life.may_abort = statistics.is_draining
        life.may_fail = is_full or (limit is not None and statistics.num_waiting_requests >= limit)
        self.core.add(life.request)
        if self.num_live == num_live:
            self._take_refusal(life)
        else:
            assert not statistics.is_draining, "a request was admitted while draining"
        return request_id

    @rule(client=CLIENTS, request_ids=st.lists(request_ids, min_size=1, max_size=3))
    def abort(self, client: int, request_ids: list[str]) -> None:
        """Requests of its own, live or ended; ids that only the other client uses mean nothing."""
        targets = self._newest_open(client, request_ids)
        if len(targets) > 1:  # of several, those that have ended could not be told from the others
            self.receive(client)
            targets = self._newest_open(client, request_ids)
        num_live = self.num_live
        self.core.abort(client, request_ids)
        num_aborted = num_live - self.num_live
        assert num_aborted in (0, len(targets)), f"{num_aborted} aborted instead of {targets}"
        if num_aborted:
            for life in targets:
                life.is_aborted = True
        else:
            self.receive(client)
            assert all(life.is_over for life in targets), f"not aborted: {targets}"

    @precondition(lambda self: self.core.has_requests)
    @rule(client=CLIENTS)
    def abort_unknown(self, client: int) -> None:
        """An id that nobody uses."""
        num_live = self.num_live
        self.core.abort(client, ["nobody's"])
        assert self.num_live == num_live

    @precondition(lambda self: not all(outbox.is_empty for outbox in self.core.outboxes))
    @rule(client=CLIENTS)
    def receive(self, client: int) -> None:
        """A client reads all that is there for it; until it does, outputs merge."""
        for message in self.core.outboxes[client].take(0.0):
            self.promises.hear(client, message)

    # Moves of the pipeline

    @precondition(lambda self: self.core.has_requests and self.driver.can_schedule)
    @rule()
    def schedule(self) -> None:
        """Plans a step, if anything can run."""
        is_frozen = self.pause_mode is PauseMode.KEEP
        assert not (self.driver.schedule() and is_frozen), "a frozen engine planned a step"

    @precondition(lambda self: self.driver.can_launch)
    @rule()
    def launch(self) -> None:
        """Hands a plan to the executor."""
        self._excusing(self.driver.launch)

    @precondition(lambda self: self.driver.can_collect)
    @rule()
    def collect(self) -> None:
        """Settles the oldest plan, however much has happened since its launch."""
        self._excusing(self.driver.collect)

    @precondition(lambda self: self.driver.can_launch)
    @rule(row=ROWS)
    def fail_launch(self, row: int) -> None:
        """The executor refuses a plan because of one of its rows."""
        self.executor.next_faults["launch"] = row
        self.launch()

    @precondition(lambda self: self.driver.can_collect)
    @rule(row=ROWS)
    def fail_collect(self, row: int) -> None:
        """The oldest plan turns out to have failed because of one of its rows."""
        self.executor.next_faults["collect"] = row
        self.collect()

    # Control

    @precondition(lambda self: not self.core.statistics().is_draining)
    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        """In one of the three ways, also while paused."""
        if mode is PauseMode.ABORT:
            excuse_aborts(self.promises.open_lives())
        self.core.pause(mode)
        self.pause_mode = mode
        assert mode is not PauseMode.ABORT or not self.core.has_requests

    @precondition(lambda self: self.pause_mode is not None)
    @rule()
    def resume(self) -> None:
        """Ends a pause."""
        self.core.resume()
        self.pause_mode = None

    @precondition(lambda self: self.core.has_running_blocks and not self.core.num_plans_in_flight)
    @rule()
    def preempt_all(self) -> None:
        """As a cache reset does it, between two steps."""
        self.core.preempt_all()
        assert self.core.statistics().num_free_blocks == self.core.statistics().num_blocks

    @precondition(lambda self: not self.core.statistics().is_draining)
    @rule()
    def start_draining(self) -> None:
        """The engine is asked to stop once all is done."""
        self.core.start_draining()
        self.pause_mode = None

    @precondition(lambda self: self.core.has_requests or self.core.num_plans_in_flight)
    @rule()
    def finish(self) -> None:
        """All that is left happens in the plainest order; then nothing may be held."""
        self.core.resume()
        self.pause_mode = None
        self._excusing(self.driver.settle_all)
        self._receive_all()
        self.every_accepted_request_ends_in_exactly_one_terminal_event()

    # Promises

    @invariant()
    def blocks_free_plus_held_equal_total(self) -> None:
        """Tables, queues, slots and blocks agree."""
        self.core.check_integrity()

    @invariant()
    def no_output_after_a_terminal_event(self) -> None:
        """Nor any output that nobody asked for."""
        self.promises.check_no_output_after_a_terminal_event()

    @invariant()
    def tokens_equal_a_solo_run(self) -> None:
        """Whatever happens beside a request."""
        self.promises.check_tokens_equal_a_solo_run()

    @invariant()
    def limits_are_kept(self) -> None:
        """No token more than was asked for."""
        self.promises.check_limits_are_kept()

    @invariant()
    def every_end_has_a_cause(self) -> None:
        """ABORT and ERROR come only where there was a reason."""
        self.promises.check_every_end_has_a_cause()

    @invariant()
    def a_failed_step_ends_only_the_request_at_fault(self) -> None:
        """One row is at fault in each failure that was planted."""
        reasons = [str(life.stop_reason) for life in self.promises.lives]
        num_ended = sum(reason.startswith("planted") for reason in reasons)
        assert num_ended <= self.executor.num_faults

    def teardown(self) -> None:
        """``finish``, and then a fresh request is served as if nothing had been."""
        if not self._is_started or sys.exception() is not self._handled:
            return  # a step has failed: what it left behind says less than its own error
        self.finish()
        if not self.core.statistics().is_draining:
            request = make_request("fresh", [1, 2], max_tokens=4)
            fresh = self.promises.begin(request)
            self.core.add(request)
            self.finish()
            assert fresh.log.finish_reason is FinishReason.LENGTH, fresh

    def every_accepted_request_ends_in_exactly_one_terminal_event(self) -> None:
        """Once all is done; that there is no second one is checked all along."""
        self.promises.check_every_life_is_over()
        statistics = self.core.statistics()
        assert not self.core.has_requests, statistics
        assert statistics.num_free_blocks == statistics.num_blocks, statistics

    # Inside

    @property
    def num_live(self) -> int:
        """Requests that the core has."""
        statistics = self.core.statistics()
        return statistics.num_running_requests + statistics.num_waiting_requests

    def _take_refusal(self, life: Life) -> None:
        """It got in neither: its end is there already, or it came under a live id."""
        self.receive(life.request.client_index)
        if not life.is_over:
            self.promises.lives.remove(life)
            assert self.promises.find(*life.key), f"dropped: {life.request}"

    def _newest_open(self, client: int, request_ids: list[str]) -> list[Life]:
        """Under each id the life that the core has, unless its end lies in the outbox."""
        found = {life.key: life for life in self.promises.open_lives(client)}
        return [life for (_, request_id), life in found.items() if request_id in request_ids]

    def _excusing(self, move: Callable[[], object]) -> None:
        """Notes whom a failed step, or an outbox that is full now, may have ended."""
        open_lives, num_faults = self.promises.open_lives(), self.executor.num_faults
        move()
        if self.executor.num_faults > num_faults:
            excuse_failures(open_lives)
        for outbox in self.core.outboxes:
            if outbox.is_full:
                excuse_failures(self.promises.open_lives(outbox.client_index))

    def _receive_all(self) -> None:
        for client in range(NUM_CLIENTS):
            self.receive(client)
