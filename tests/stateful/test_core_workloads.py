"""The core under random workloads: every request's tokens equal its run alone."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.stateful.core_workloads import WorkloadRun
from tests.stateful.random_workloads import draw_workload, run_at_random


def run_seed(seed: int, *, enable_prefix_caching: bool = True) -> WorkloadRun:
    rng = random.Random(seed)
    workload = draw_workload(rng)
    workload.config = msgspec.structs.replace(
        workload.config, enable_prefix_caching=enable_prefix_caching
    )
    run = WorkloadRun(workload)
    run_at_random(run, rng)
    return run


@pytest.mark.known_fault(kind="abort-during-a-step")
@pytest.mark.known_fault(kind="wrong-cache-hit")
@pytest.mark.parametrize("num_seeds", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_tokens_equal_a_solo_run_with_the_prefix_cache_and_without(num_seeds: int) -> None:
    runs = [run_seed(seed) for seed in range(num_seeds)]
    for run in runs:
        run.check_against_solo()
    # The workloads must go on meeting what they are there for.
    preempted = {run for run in runs if run.core.statistics().num_preemptions}
    faulty = {run for run in runs if run.executor.num_faults}
    aborted = {run for run in runs if any(life.is_aborted for life in run.lives)}
    hitting = {run for run in runs if run.core.statistics().num_prefix_cache_hits}
    assert len(preempted & faulty) >= num_seeds // 10
    assert len(preempted & aborted) >= num_seeds // 10
    assert len(hitting) >= num_seeds // 4
    assert len(hitting & preempted) >= num_seeds // 10
    found = [life for run in runs for life in run.lives if run.num_cached_tokens(life)]
    assert sum(life.request.lora_request is not None for life in found) >= num_seeds // 15
    assert sum(life.request.cache_salt is not None for life in found) >= num_seeds // 30
    num_compared = 0
    for seed, run in enumerate(runs):
        uncached = run_seed(seed, enable_prefix_caching=False)
        assert uncached.core.statistics().num_cached_blocks == 0
        for with_cache, without in zip(run.outcomes(), uncached.outcomes(), strict=True):
            if with_cache is not None and without is not None:
                assert with_cache == without
                num_compared += 1
    assert num_compared >= 3 * num_seeds


@pytest.mark.known_fault(kind="abort-during-a-step")
@pytest.mark.soak
def test_tokens_equal_a_solo_run_in_2000_workloads() -> None:
    for seed in range(2000):
        run_seed(seed).check_against_solo()
