"""The built-in model's greedy text equals transformers' on the same file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.model.decoding import GREEDY, PlanDriver
from tests.model.greedy_oracle import NUM_TOKENS, GreedyOracle
from trio_engine.config import EngineConfig
from trio_engine.executor.torch_executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def oracle() -> GreedyOracle:
    return GreedyOracle()


@pytest.fixture(scope="module")
def driver() -> Iterator[PlanDriver]:
    executor = TorchExecutor(EngineConfig(model="smollm2", device="cpu", max_num_seqs=20))
    properties = executor.load()
    yield PlanDriver(executor, properties.num_blocks, properties.block_size)
    executor.shutdown()


def test_twenty_prompts_together(driver: PlanDriver, oracle: GreedyOracle) -> None:
    """Prompts in chunks beside decoding rows, then twenty rows at once."""
    prompts = oracle.prompts()
    outputs = driver.generate(prompts, [GREEDY] * len(prompts), NUM_TOKENS, chunk=64)
    oracle.check(prompts, outputs)


def test_prompts_one_by_one(driver: PlanDriver, oracle: GreedyOracle) -> None:
    prompts = oracle.prompts()[:3]
    outputs = [driver.generate([prompt], [GREEDY], NUM_TOKENS)[0] for prompt in prompts]
    oracle.check(prompts, outputs)
    assert oracle.decode(outputs[0][:8]) == "The capital of France is Paris."
