"""A state machine for the core: its moves in any order, against the promises to its clients.

Public kit, pure but for the executor; needs hypothesis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from trio_engine.config import EngineConfig
from trio_engine.requests import PauseMode
from trio_engine.testing.core_driver import CoreDriver
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
from trio_engine.testing.requests import make_core

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.engine_core import EngineCore
    from trio_engine.testing.promises import Life

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
        "long_prefill_token_threshold": st.integers(1, 3),
        "scheduling_policy": st.just("priority"),
        "enable_prefix_caching": st.just(False),
        "pipeline_depth": st.just(1),
        "launches_ahead": st.just(True),
        "max_waiting_requests": st.integers(0, 2),
        "outbox_limit_bytes": st.just(1500),
    },
)


class EngineCoreMachine(PromiseMachine):
    """An ``EngineCore``, a ``FlakyExecutor`` and two clients.

    The rules are the moves of clients, step loop and forward thread, one at a time and in any
    order that they could come in. What they leave, ``teardown`` does in the plainest order; then
    every request must have had its end, and nothing may be held. After a drain there is a new
    core.

    Attributes:
        config: of the engine.
        driver: makes the pipeline's moves.
        pause_mode: of the pause that is on, if any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pause_mode: PauseMode | None = None
        self._is_started = False

    @initialize(limits=LIMITS, first=FIRST)
    def start(self, limits: dict[str, Any], first: list[dict[str, Any]]) -> None:
        """Begins with a pool for one request of full length, and some requests."""
        options = {"launches_ahead": False, "num_more_blocks": 0} | limits
        self._launches_ahead = options.pop("launches_ahead")
        num_blocks = -(-options["max_model_len"] // options["block_size"])
        num_blocks += options.pop("num_more_blocks")
        self.config = EngineConfig(executor="kv-checking", num_blocks=num_blocks, **options)
        self._begin()
        self._is_started = True
        for request in first:
            self.add(**request)

    @property
    def core(self) -> EngineCore:
        """The core under test."""
        return self.driver.core

    # Moves of clients

    @rule(client=CLIENTS, request_id=IDS, prompt=PROMPTS, options=OPTIONS)
    def add(self, client: int, request_id: str, prompt: list[int], options: dict[str, Any]) -> None:
        """A request, under an id that may be free, live, or ended without its client's knowing."""
        if self.core.statistics().is_draining and not self.core.has_requests:
            self._settle_all()
            self._begin()
        life = self.begin_life(client, request_id, prompt, options)
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

    @precondition(lambda self: self.core.has_requests)
    @rule(client=CLIENTS, request_ids=IDS_TO_ABORT)
    def abort(self, client: int, request_ids: list[str]) -> None:
        """Requests of its own, live or ended; ids that it does not use mean nothing."""
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

    # Without a precondition, as the first rule by name: see ``promise_machine``.
    @rule()
    def collect(self) -> None:
        """Settles the oldest plan, however much has happened since its launch."""
        if self.driver.can_collect:
            self._excusing(self.driver.collect)

    @precondition(lambda self: self.core.has_requests)
    @rule(num_steps=st.integers(1, 8))
    def run_steps(self, num_steps: int) -> None:
        """So many steps in the plainest order, as far as anything can run."""
        for _ in range(num_steps):
            if self.driver.can_schedule:
                self.schedule()
            if self.driver.can_launch:
                self.launch()
            if self.driver.can_collect:
                self.collect()

    @precondition(lambda self: self.driver.can_launch or self.driver.can_collect)
    @rule(row=ROWS)
    def fail(self, row: int) -> None:
        """The next move of the executor fails because of one of the plan's rows."""
        if self.driver.can_collect:
            self.executor.next_faults["collect"] = row
            self.collect()
        else:
            self.executor.next_faults["launch"] = row
            self.launch()

    # Control

    @precondition(lambda self: self.core.has_requests)
    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        """In one of the three ways, also while paused; a drain must not be frozen."""
        if self.core.statistics().is_draining:
            return
        if mode is PauseMode.ABORT:
            excuse_aborts(self.promises.open_lives())
        self.core.pause(mode)
        self.pause_mode = mode
        assert mode is not PauseMode.ABORT or not self.core.has_requests

    @precondition(lambda self: self.pause_mode is not None)
    @rule()
    def resume(self) -> None:
        """Ends a pause that is on as far as the client knows."""
        self.core.resume()
        self.pause_mode = None

    @precondition(lambda self: self.has_running_blocks and not self.core.num_plans_in_flight)
    @rule()
    def preempt_all(self) -> None:
        """As a sleep does it, between two steps."""
        self.core.preempt_all()
        assert self.core.statistics().num_free_blocks == self.core.statistics().num_blocks

    @precondition(lambda self: self.has_cached_blocks and not self.core.num_plans_in_flight)
    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running: bool) -> None:
        """Between two steps; blocks that are held stop it, unless they are taken."""
        has_blocks = self.has_running_blocks
        assert self.core.reset_prefix_cache(reset_running=reset_running) is (
            reset_running or not has_blocks
        )
        assert self.has_cached_blocks is (has_blocks and not reset_running)

    @precondition(lambda self: self.core.has_requests)
    @rule()
    def start_draining(self) -> None:
        """The engine is asked to stop once all is done."""
        self.core.start_draining()
        self.pause_mode = None

    @precondition(lambda self: self.core.has_requests)
    @rule()
    def finish(self) -> None:
        """All that is left happens in the plainest order; then nothing is held, and it serves."""
        if self.pause_mode is not None:  # else none may be on, as after a drain has begun
            self.resume()
        self._settle_all()
        if not self.core.statistics().is_draining:
            self.add(client=0, request_id="fresh", prompt=[1, 2], options={"max_tokens": 4})
            self._settle_all()

    def teardown(self) -> None:
        """``finish``."""
        if self._is_started and not self.has_failed:
            self.finish()

    # Promises at the end

    def every_accepted_request_ends_in_exactly_one_terminal_event(self) -> None:
        """Once all is done; that there is no second one is checked all along."""
        self.promises.check_every_life_is_over()
        self.check_nothing_is_held()

    # Inside

    def _begin(self) -> None:
        self.executor = self.make_executor(self.config, launches_ahead=self._launches_ahead)
        core = make_core(self.config, self.executor, num_clients=NUM_CLIENTS)
        depth = self.config.pipeline_depth
        self.driver = CoreDriver(core, self.executor, pipeline_depth=depth)
        self.promises = Promises(self.run_alone)
        self.pause_mode = None

    @property
    def has_running_blocks(self) -> bool:
        """Whether a running request holds KV blocks."""
        return self.core.statistics().num_running_requests > 0

    @property
    def has_cached_blocks(self) -> bool:
        """Whether a request could find anything."""
        return self.core.statistics().num_cached_blocks > 0

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

    def _settle_all(self) -> None:
        self._excusing(self.driver.settle_all)
        for client in range(NUM_CLIENTS):
            self.receive(client)
        self.every_accepted_request_ends_in_exactly_one_terminal_event()
