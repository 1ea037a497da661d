"""Random workloads in which requests follow grammars: tokens equal a run alone, and are allowed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.stateful.core_workloads import VOCAB_SIZE, Life, WorkloadRun, make_core
from tests.stateful.random_workloads import draw_workload, run_at_random
from trio_engine.config import EngineConfig
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import SamplingParams, StructuredOutputsParams
from trio_engine.testing.core_driver import CoreDriver
from trio_engine.testing.hashed_grammar import HashedGrammar

if TYPE_CHECKING:
    from tests.stateful.core_workloads import Workload
    from trio_engine.requests import EngineCoreRequest
    from trio_engine.testing.core_driver import RequestLog


def compile_hashed(params: StructuredOutputsParams) -> HashedGrammar:
    """The regex is the number of tokens."""
    assert params.regex is not None
    return HashedGrammar(VOCAB_SIZE, int(params.regex))


class StructuredRun(WorkloadRun):
    """Grammars come at random moments, and at the latest when nothing else can be done."""

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        super().__init__(workload)
        self._rng = rng
        self.driver = CoreDriver(
            self.core,
            self.executor,
            pipeline_depth=workload.config.pipeline_depth,
            compile_grammar=compile_hashed,
        )

    def receive(self) -> None:
        super().receive()
        if self._rng.random() < 0.3:
            self._compile()

    def resume(self) -> None:
        super().resume()
        self._compile()

    def _compile(self) -> None:
        if self.driver.compile_grammar():
            self._check()

    def solo(self, life: Life) -> RequestLog:
        if life.solo is None:
            life.solo = run_alone(life.request, self.core.max_model_len)
        return life.solo


def run_alone(request: EngineCoreRequest, max_model_len: int) -> RequestLog:
    config = EngineConfig(
        executor="kv-checking", max_model_len=max_model_len, max_num_seqs=1, enable_lora=True
    )
    executor = KVCheckingExecutor(config, vocab_size=VOCAB_SIZE)
    driver = CoreDriver(
        make_core(config, executor), executor, pipeline_depth=1, compile_grammar=compile_hashed
    )
    log = driver.listen(request.client_index, request.request_id)
    driver.core.add(request)
    driver.run_until_idle()
    return log


def params_of(life: Life) -> SamplingParams:
    assert life.request.sampling_params is not None
    return life.request.sampling_params


def run_seed(seed: int) -> StructuredRun:
    rng = random.Random(seed)
    workload = draw_workload(rng)
    for request in workload.requests:
        assert request.sampling_params is not None
        if rng.random() < 0.6:
            request.sampling_params.structured_outputs = StructuredOutputsParams(
                regex=str(rng.choice([1, 2, 5, 9, 40]))
            )
    run = StructuredRun(workload, rng)
    run_at_random(run, rng)
    return run


def check_grammars(run: StructuredRun) -> None:
    for life in run.lives:
        params = params_of(life)
        if params.structured_outputs is None:
            continue
        grammar = compile_hashed(params.structured_outputs)
        ends = {*(params.stop_token_ids or ())}
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
        grammar.check(life.log.token_ids, ends)
        if len(life.log.token_ids) > grammar.num_tokens or (
            not ends and len(life.log.token_ids) == grammar.num_tokens
        ):
            assert life.log.finish_reason in (FinishReason.STOP, None), life.request


def run_and_check(num_seeds: int) -> list[StructuredRun]:
    runs = [run_seed(seed) for seed in range(num_seeds)]
    for run in runs:
        run.check_against_solo()
        check_grammars(run)
    return runs


def test_structured_rows_give_what_they_give_alone() -> None:
    runs = run_and_check(90)
    # The workloads must go on meeting what they are there for.
    structured = [
        (run, life)
        for run in runs
        for life in run.lives
        if params_of(life).structured_outputs is not None
    ]
    stopped = [life for _, life in structured if life.log.finish_reason is FinishReason.STOP]
    preempted = [life for run, life in structured if run.core.statistics().num_preemptions]
    failed = [life for run, life in structured if run.executor.num_faults]
    aborted = [life for _, life in structured if life.is_aborted and not life.log.token_ids]
    assert min(map(len, (stopped, preempted, failed, aborted))) >= 30, (
        len(stopped),
        len(preempted),
        len(failed),
        len(aborted),
    )


@pytest.mark.soak
def test_structured_rows_give_what_they_give_alone_in_1500_workloads() -> None:
    run_and_check(1500)
