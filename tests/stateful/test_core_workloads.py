"""The core under random workloads: every request's tokens equal its run alone."""

from __future__ import annotations

import random

import pytest

from tests.stateful.core_workloads import WorkloadRun, draw_workload, run_at_random


def run_seed(seed: int) -> WorkloadRun:
    rng = random.Random(seed)
    run = WorkloadRun(draw_workload(rng))
    run_at_random(run, rng)
    run.check_against_solo()
    return run


def test_tokens_equal_a_solo_run() -> None:
    runs = [run_seed(seed) for seed in range(250)]
    # The workloads must go on meeting what they are there for.
    preempted = {run for run in runs if run.core.statistics().num_preemptions}
    faulty = {run for run in runs if run.executor.num_faults}
    aborted = {run for run in runs if any(life.is_aborted for life in run.lives)}
    assert len(preempted & faulty) >= 30
    assert len(preempted & aborted) >= 30


@pytest.mark.slow
def test_tokens_equal_a_solo_run_in_2000_workloads() -> None:
    for seed in range(2000):
        run_seed(seed)
