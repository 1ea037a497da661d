"""Workloads for the core with the KV-checking executor, and their oracle: solo runs.

A run makes the moves of the step loop, the forward thread and the clients one at a time; whoever
chooses them, at random or by Hypothesis, meets every interleaving.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.errors import RequestStepError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest, PauseMode
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.core_driver import CoreDriver, RequestLog

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from trio_engine.core.plan import StepPlan, StepResult

VOCAB_SIZE = 40
NUM_CLIENTS = 2
# Ten times what the longest workload takes: a bug is a failure and not a hang.
MAX_MOVES = 20_000

Moment = Literal["launch", "collect"]


class FlakyExecutor(KVCheckingExecutor):
    """Fails on demand, before a plan runs or after all of it ran."""

    def __init__(self, config: EngineConfig, *, launches_ahead: bool) -> None:
        super().__init__(config, launches_ahead=launches_ahead, vocab_size=VOCAB_SIZE)
        self.num_faults = 0
        # Which row is at fault in the plan that is next launched or collected.
        self.next_faults: dict[Moment, int] = {}
        self._slots: deque[Sequence[int]] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._fail("launch", plan.slots)
        super().launch(plan)
        self._slots.append(plan.slots)

    def collect(self) -> StepResult:
        result = super().collect()
        self._fail("collect", self._slots.popleft())
        return result

    def _fail(self, moment: Moment, slots: Sequence[int]) -> None:
        row = self.next_faults.pop(moment, None)
        if row is not None:
            self.num_faults += 1
            raise RequestStepError(f"planted at {moment}", slots=[slots[row % len(slots)]])


@dataclass
class Workload:
    """Requests and the limits they run under."""

    config: EngineConfig
    launches_ahead: bool
    requests: list[EngineCoreRequest]


@dataclass
class Life:
    """One life of a request id, and what its client heard of it."""

    request: EngineCoreRequest
    log: RequestLog
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_aborted or self.log.finish_reason is not None


class WorkloadRun:
    """A workload on its way. A move that cannot be made now is none; each is checked."""

    def __init__(self, workload: Workload) -> None:
        self.executor = FlakyExecutor(workload.config, launches_ahead=workload.launches_ahead)
        self.core = make_core(workload.config, self.executor)
        self.driver = CoreDriver(
            self.core, self.executor, pipeline_depth=workload.config.pipeline_depth
        )
        self.arrivals = list(workload.requests)
        self.lives: list[Life] = []
        self._num_moves = 0

    @property
    def is_over(self) -> bool:
        return not (self.arrivals or self.core.has_requests or self.core.num_plans_in_flight)

    def add(self) -> None:
        """The next request, once its client knows that no other lives under its id."""
        self.driver.receive()
        request = self.arrivals[0] if self.arrivals else None
        if request is None or any(_is_same(life.request, request) for life in self._live()):
            return
        del self.arrivals[0]
        log = self.driver.listen(request.client_index, request.request_id)
        self.lives.append(Life(request, log))
        self.core.add(request)
        self._check()

    def abort(self, index: int) -> None:
        """Some request that lives as far as its client knows."""
        self.driver.receive()
        live = self._live()
        if live:
            life = live[index % len(live)]
            life.is_aborted = True
            self.core.abort(life.request.client_index, [life.request.request_id])
            self._check()

    def schedule(self) -> None:
        if self.driver.can_schedule:
            self.driver.schedule()
            self._check()

    def launch(self) -> None:
        if self.driver.can_launch:
            self.driver.launch()
            self._check()

    def collect(self) -> None:
        if self.driver.can_collect:
            self.driver.collect()
            self._check()

    def fail_launch(self, index: int) -> None:
        """The next plan launched, by one of its rows."""
        self.executor.next_faults["launch"] = index

    def fail_collect(self, index: int) -> None:
        """The next plan collected, by one of its rows."""
        self.executor.next_faults["collect"] = index

    def receive(self) -> None:
        self.driver.receive()

    def pause(self) -> None:
        self.core.pause(PauseMode.KEEP)

    def resume(self) -> None:
        self.core.resume()

    def preempt_all(self) -> None:
        """Only while nothing is in flight, as a reset does it."""
        if not self.core.num_plans_in_flight:
            self.core.preempt_all()
            self._check()

    def finish(self) -> None:
        """All that is left, in the plainest order."""
        self.core.resume()
        while not self.is_over:
            self.add()
            self.schedule()
            self.schedule()
            self.launch()
            self.collect()
        self.driver.receive()

    def check_against_solo(self) -> None:
        """Every life heard what it hears alone, or a beginning of that if it was ended early."""
        statistics = self.core.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks
        for life in self.lives:
            request, log = life.request, life.log
            solo = run_alone(request, self.core.max_model_len)
            assert log.token_ids == solo.token_ids[: len(log.token_ids)], request
            if life.is_aborted:
                assert log.finish_reason is None, request
            elif log.finish_reason is FinishReason.ERROR:
                assert self.executor.num_faults, request
            else:
                assert log.finish_reason is solo.finish_reason, request
                assert log.token_ids == solo.token_ids, request
                assert log.outputs[-1].stop_reason == solo.outputs[-1].stop_reason
            assert request.request_id in self.driver.finished_ids[request.client_index]

    def _live(self) -> list[Life]:
        return [life for life in self.lives if not life.is_over]

    def _check(self) -> None:
        self.core.check_integrity()
        self._num_moves += 1
        assert self._num_moves <= MAX_MOVES, f"no end after {MAX_MOVES} moves"


def make_request(
    index: int, prompt: list[int], *, max_tokens: int, min_tokens: int, stops: bool, eos: bool
) -> EngineCoreRequest:
    """A request; the clients take turns and use the same three ids again and again."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        eos_token_id=3 if eos else None,
        stop_token_ids=[5, 7] if stops else None,
    )
    return EngineCoreRequest(
        f"r{index // NUM_CLIENTS % 3}",
        prompt,
        None,
        params,
        None,
        0.0,
        None,
        None,
        None,
        client_index=index % NUM_CLIENTS,
    )


def make_config(
    *,
    max_model_len: int,
    block_size: int,
    num_full_requests: int,
    num_more_blocks: int,
    **limits: int,
) -> EngineConfig:
    """Limits whose pool holds so many requests of full length and some blocks more."""
    return EngineConfig(
        executor="kv-checking",
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_full_requests * -(-max_model_len // block_size) + num_more_blocks,
        **limits,  # type: ignore[arg-type]
    )


def make_core(config: EngineConfig, executor: KVCheckingExecutor) -> EngineCore:
    """A core whose clock counts calls."""
    ticks = count()
    return EngineCore(
        config, executor.load(), num_clients=NUM_CLIENTS, clock=lambda: float(next(ticks))
    )


def run_alone(request: EngineCoreRequest, max_model_len: int) -> RequestLog:
    """The oracle: one request in an ample pool, each step awaited."""
    config = EngineConfig(executor="kv-checking", max_model_len=max_model_len, max_num_seqs=1)
    executor = KVCheckingExecutor(config, vocab_size=VOCAB_SIZE)
    driver = CoreDriver(make_core(config, executor), executor, pipeline_depth=1)
    log = driver.listen(request.client_index, request.request_id)
    driver.core.add(request)
    driver.run_until_idle()
    return log


def draw_workload(rng: random.Random) -> Workload:
    """At random: pools from barely one request to ample, chunks from 1 token up."""
    max_model_len = rng.choice([8, 20, 48])
    config = make_config(
        max_model_len=max_model_len,
        block_size=rng.choice([1, 1, 2, 4, 16]),
        num_full_requests=rng.choice([1, 1, 1, 1, 3]),
        num_more_blocks=rng.randint(0, 2),
        max_num_seqs=rng.choice([1, 3, 8, 8, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 64, 64]),
        pipeline_depth=rng.choice([1, 2, 2]),
    )
    return Workload(
        config=config,
        launches_ahead=rng.random() < 0.5,
        requests=[_draw_request(rng, index, max_model_len) for index in range(rng.randint(2, 10))],
    )


def _draw_request(rng: random.Random, index: int, max_model_len: int) -> EngineCoreRequest:
    prompt_length = min(rng.choice([1, 1, 2, 3, 4, 5, 12, 30]), max_model_len - 1)
    return make_request(
        index,
        [rng.randrange(VOCAB_SIZE) for _ in range(prompt_length)],
        max_tokens=rng.choice([1, 2, 5, 8, 30, 100, 100, 100]),
        min_tokens=rng.randint(0, 3),
        stops=rng.random() < 0.2,
        eos=rng.random() < 0.2,
    )


def run_at_random(run: WorkloadRun, rng: random.Random) -> None:
    """Makes moves at random until nothing is left to do."""
    arrival_rate = rng.choice([0.05, 0.5, 1.0, 1.0])
    abort_rate = rng.choice([0.0, 0.01, 0.03])
    control_rate = rng.choice([0.0, 0.0, 0.02])
    fault_rate = rng.choice([0.0, 0.01])
    # Where a plan that preempts is in flight is where most can go wrong.
    after_preemption_rate = rng.choice([0.0, 0.5])
    num_preemptions = 0
    while not run.is_over:
        if rng.random() < arrival_rate or not run.core.has_requests:
            run.add()
        if rng.random() < abort_rate:
            run.abort(rng.randrange(8))
        if rng.random() < control_rate:
            rng.choice([run.pause, run.preempt_all])()
        preempts = run.core.statistics().num_preemptions > num_preemptions
        num_preemptions = run.core.statistics().num_preemptions
        if rng.random() < (after_preemption_rate if preempts else fault_rate):
            rng.choice([run.fail_launch, run.fail_collect, run.fail_collect])(rng.randrange(8))
        moves = [
            move
            for move, is_possible in (
                (run.schedule, run.driver.can_schedule and not run.core.is_paused),
                (run.launch, run.driver.can_launch),
                (run.collect, run.driver.can_collect),
            )
            if is_possible
        ]
        rng.choice(moves or [run.resume])()
        if rng.random() < 0.5:
            run.receive()
    run.receive()


def _is_same(first: EngineCoreRequest, second: EngineCoreRequest) -> bool:
    return (first.client_index, first.request_id) == (second.client_index, second.request_id)
