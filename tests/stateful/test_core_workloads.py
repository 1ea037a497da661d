"""The core under random workloads: every request's tokens equal its run alone."""

from __future__ import annotations

import random

import pytest

from tests.stateful.core_workloads import check_against_solo, make_workload, run_workload


def check_seed(seed: int) -> None:
    rng = random.Random(seed)
    workload = make_workload(rng)
    driver, aborted = run_workload(workload, rng)
    check_against_solo(driver, workload, aborted)


def test_tokens_equal_a_solo_run() -> None:
    for seed in range(200):
        check_seed(seed)


@pytest.mark.slow
def test_tokens_equal_a_solo_run_in_2000_workloads() -> None:
    for seed in range(2000):
        check_seed(seed)
