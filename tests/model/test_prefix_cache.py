"""The torch model starts rows behind KV that others have computed, and says the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.model.decoding import RunnerExecutor, load_decoder
from tests.model.tiny_models import make_hf_folder
from tests.stateful.core_workloads import Workload, WorkloadRun, draw_workload, run_at_random
from trio_engine.checkpoint import locate_model

if TYPE_CHECKING:
    from trio_engine.model.decoder import Decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder, _ = make_hf_folder("llama", tmp_path_factory.mktemp("llama"))
    return load_decoder(locate_model(str(folder)))


class ModelRun(WorkloadRun):
    """A workload whose plans a model runs, and none of them fails."""

    def __init__(self, workload: Workload, decoder: Decoder) -> None:
        self._decoder = decoder
        super().__init__(workload)

    def make_executor(self, workload: Workload) -> Any:
        launches_ahead = workload.launches_ahead
        return RunnerExecutor(self._decoder, workload.config, launches_ahead=launches_ahead)

    def fail_launch(self, index: int) -> None:
        """Nothing."""

    def fail_collect(self, index: int) -> None:
        """Nothing."""


def run_seed(decoder: Decoder, seed: int, *, enable_prefix_caching: bool) -> ModelRun:
    rng = random.Random(seed)
    workload = draw_workload(rng)
    workload.config = msgspec.structs.replace(
        workload.config, enable_prefix_caching=enable_prefix_caching
    )
    run = ModelRun(workload, decoder)
    run_at_random(run, rng)
    return run


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 72), marks=pytest.mark.slow)])
def test_the_prefix_cache_changes_no_token_of_random_workloads(
    decoder: Decoder, seeds: range
) -> None:
    num_compared = num_hitting = num_preempted = 0
    for seed in seeds:
        cached, uncached = (
            run_seed(decoder, seed, enable_prefix_caching=enabled) for enabled in (True, False)
        )
        for with_cache, without in zip(cached.outcomes(), uncached.outcomes(), strict=True):
            if with_cache is not None and without is not None:
                assert with_cache == without, seed
                num_compared += 1
        num_hitting += cached.core.statistics().num_prefix_cache_hits > 0
        num_preempted += cached.core.statistics().num_preemptions > 0
    # The workloads must go on meeting what they are there for.
    assert num_compared >= 3 * len(seeds)
    assert num_hitting >= len(seeds) // 4
    assert num_preempted >= len(seeds) // 6
