"""Random workloads for the core with the KV-checking executor, and their oracle: solo runs."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import msgspec

from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.errors import RequestStepError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.core_driver import CoreDriver, RequestLog

if TYPE_CHECKING:
    import random

    from trio_engine.core.plan import StepPlan, StepResult

VOCAB_SIZE = 40
MAX_MODEL_LEN = 64
NUM_CLIENTS = 2


class FlakyExecutor(KVCheckingExecutor):
    """Fails some plans for one of their rows, before, or after the whole plan ran."""

    def __init__(
        self, config: EngineConfig, rng: random.Random, *, launches_ahead: bool, failure_rate: float
    ) -> None:
        super().__init__(config, launches_ahead=launches_ahead, vocab_size=VOCAB_SIZE)
        self._rng = rng
        self._failure_rate = failure_rate
        self._failed_slots: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> None:
        fails = self._rng.random() < self._failure_rate
        slot = self._rng.choice(list(plan.slots))
        if fails and self._rng.random() < 0.5:
            raise RequestStepError("planted at launch", slots=[slot])
        super().launch(plan)
        if fails:
            self._failed_slots[plan.plan_id] = slot

    def collect(self) -> StepResult:
        result = super().collect()
        slot = self._failed_slots.pop(result.plan_id, None)
        if slot is not None:
            raise RequestStepError("planted at collect", slots=[slot])
        return result


class Workload(msgspec.Struct):
    """Requests with their arrival and abort moves, and the limits they run under."""

    config: EngineConfig
    launches_ahead: bool
    failure_rate: float
    requests: list[EngineCoreRequest]
    abort_rate: float


def make_workload(rng: random.Random) -> Workload:
    """Draws a workload: pools from barely one request to ample, chunks from 1 token up."""
    block_size = rng.choice([1, 2, 4, 16])
    blocks_for_one = -(-MAX_MODEL_LEN // block_size)
    config = EngineConfig(
        executor="kv-checking",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([1, 3, 8, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 64, 256]),
        block_size=block_size,
        num_blocks=rng.choice([1, 1, 1, 3]) * blocks_for_one + rng.randint(0, 2),
        pipeline_depth=rng.choice([1, 2, 2]),
    )
    return Workload(
        config=config,
        launches_ahead=rng.random() < 0.5,
        failure_rate=rng.choice([0.0, 0.0, 0.05]),
        requests=[make_request(rng, index) for index in range(rng.randint(1, 12))],
        abort_rate=rng.choice([0.0, 0.0, 0.03]),
    )


def make_request(rng: random.Random, index: int) -> EngineCoreRequest:
    """Draws a request; the same few ids come from both clients."""
    max_tokens = rng.choice([1, 8, 40, 100, 100])
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(3, max_tokens)),
        eos_token_id=rng.choice([None, None, 3]),
        stop_token_ids=rng.choice([None, None, [5, 7]]),
    )
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 1, 2, 3, 4, 5, 17, 40]))]
    return EngineCoreRequest(
        f"r{index}",
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


def make_core(config: EngineConfig, executor: KVCheckingExecutor) -> EngineCore:
    """A core whose clock counts calls."""
    ticks = count()
    return EngineCore(
        config, executor.load(), num_clients=NUM_CLIENTS, clock=lambda: float(next(ticks))
    )


def run_alone(request: EngineCoreRequest) -> RequestLog:
    """The oracle: one request in an ample pool, each step awaited."""
    config = EngineConfig(executor="kv-checking", max_model_len=MAX_MODEL_LEN, max_num_seqs=1)
    executor = KVCheckingExecutor(config, vocab_size=VOCAB_SIZE)
    driver = CoreDriver(make_core(config, executor), executor, pipeline_depth=1)
    log = driver.listen(request.client_index, request.request_id)
    driver.core.add(request)
    driver.run_until_idle()
    return log


def run_workload(workload: Workload, rng: random.Random) -> tuple[CoreDriver, set[str]]:
    """Runs a workload by random moves. Returns the driver and the ids that were aborted."""
    executor = FlakyExecutor(
        workload.config,
        rng,
        launches_ahead=workload.launches_ahead,
        failure_rate=workload.failure_rate,
    )
    driver = CoreDriver(
        make_core(workload.config, executor),
        executor,
        pipeline_depth=workload.config.pipeline_depth,
    )
    arrivals = list(workload.requests)
    arrival_rate = rng.choice([0.05, 0.5, 1.0])
    aborted: set[str] = set()
    while arrivals or driver.core.has_requests or driver.core.num_plans_in_flight:
        if arrivals and (rng.random() < arrival_rate or not driver.core.has_requests):
            request = arrivals.pop(0)
            driver.listen(request.client_index, request.request_id)
            driver.core.add(request)
        if rng.random() < workload.abort_rate:
            victim = rng.choice(workload.requests)
            driver.core.abort(victim.client_index, [victim.request_id])
            driver.receive()
            if driver.logs.get((victim.client_index, victim.request_id), None) and (
                driver.logs[(victim.client_index, victim.request_id)].finish_reason is None
            ):
                aborted.add(victim.request_id)
        make_move(driver, rng)
        driver.core.check_integrity()
        if rng.random() < 0.5:
            driver.receive()
    driver.receive()
    return driver, aborted


def make_move(driver: CoreDriver, rng: random.Random) -> None:
    """One move of the step loop or of the forward thread."""
    moves = []
    if driver.can_schedule:
        moves.append(driver.schedule)
    if driver.can_launch:
        moves.append(driver.launch)
    if driver.can_collect:
        moves.append(driver.collect)
    rng.choice(moves)()


def check_against_solo(driver: CoreDriver, workload: Workload, aborted: set[str]) -> None:
    """Every request heard what it hears alone, or a beginning of it if it was ended early."""
    statistics = driver.core.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks
    for request in workload.requests:
        log = driver.logs[(request.client_index, request.request_id)]
        solo = run_alone(request)
        if request.request_id in aborted:
            assert log.finish_reason is None, request.request_id
        elif log.finish_reason is FinishReason.ERROR:
            assert workload.failure_rate, request.request_id
        else:
            assert log.finish_reason is solo.finish_reason, request.request_id
            assert log.token_ids == solo.token_ids, request.request_id
            assert log.outputs[-1].stop_reason == solo.outputs[-1].stop_reason
        assert log.token_ids == solo.token_ids[: len(log.token_ids)], request.request_id
        assert request.request_id in driver.finished_ids[request.client_index]
