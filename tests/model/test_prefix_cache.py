"""The torch model starts rows behind KV that others have computed, and says the same."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.model.decoding import RunnerExecutor, load_decoder
from tests.model.test_lora import save_adapter
from tests.model.tiny_models import make_hf_folder
from tests.stateful.core_workloads import Workload, WorkloadRun
from tests.stateful.random_workloads import draw_workload, run_at_random
from trio_engine.checkpoint import locate_model
from trio_engine.model.decoder import Decoder
from trio_engine.requests import LoRARequest


class Model(NamedTuple):
    """A tiny model, and adapters for it."""

    decoder: Decoder
    adapters: list[LoRARequest]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, _ = make_hf_folder("llama", tmp_path_factory.mktemp("llama"))
    adapters = []
    for number in (1, 2):
        path = tmp_path_factory.mktemp("adapter")
        save_adapter(path, "llama", seed=number)
        adapters.append(LoRARequest(f"adapter-{number}", number, str(path)))
    return Model(load_decoder(locate_model(str(folder))), adapters)


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


def run_seed(model: Model, seed: int, *, enable_prefix_caching: bool) -> ModelRun:
    rng = random.Random(seed)
    workload = draw_workload(rng, model.adapters)
    workload.config = msgspec.structs.replace(
        workload.config, enable_prefix_caching=enable_prefix_caching
    )
    run = ModelRun(workload, model.decoder)
    run_at_random(run, rng)
    return run


@pytest.mark.known_fault(kind="wrong-cache-hit")
@pytest.mark.parametrize(
    "seeds",
    [
        range(12),
        pytest.param(range(12, 36), marks=pytest.mark.slow),
        pytest.param(range(36, 300), marks=pytest.mark.soak),
    ],
)
def test_the_prefix_cache_changes_no_token_of_random_workloads(model: Model, seeds: range) -> None:
    num_compared = num_hitting = num_preempted = num_adapted = 0
    for seed in seeds:
        cached, uncached = (
            run_seed(model, seed, enable_prefix_caching=enabled) for enabled in (True, False)
        )
        for with_cache, without in zip(cached.outcomes(), uncached.outcomes(), strict=True):
            if with_cache is not None and without is not None:
                assert with_cache == without, seed
                num_compared += 1
        num_hitting += cached.core.statistics().num_prefix_cache_hits > 0
        num_preempted += cached.core.statistics().num_preemptions > 0
        num_adapted += sum(
            life.request.lora_request is not None and cached.num_cached_tokens(life) > 0
            for life in cached.lives
        )
    # The workloads must go on meeting what they are there for.
    assert num_compared >= 3 * len(seeds)
    assert num_hitting >= len(seeds) // 4
    assert num_preempted >= len(seeds) // 6
    assert num_adapted > 0
