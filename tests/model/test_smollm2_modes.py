"""The built-in model's greedy text through the core, in four modes, equals transformers'."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.model.greedy_oracle import MAX_TIES, NUM_TOKENS, TIE_GAP, Comparison, GreedyOracle
from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.executor.torch_executor import TorchExecutor
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.core_driver import CoreDriver

if TYPE_CHECKING:
    from trio_engine.core.statistics import EngineCoreStatistics

MAX_MODEL_LEN = 640
# Barely more than the longest prompt and its answer: about a third of what all twenty need, and
# less than every second of them does.
SMALL_POOL_BLOCKS = 64


class Mode(NamedTuple):
    """How the twenty prompts are run: how many at once, and under which limits."""

    at_once: int
    max_num_batched_tokens: int
    num_blocks: int


MODES = {
    "alone": Mode(1, 2048, 1000),
    "one batch": Mode(20, 8192, 1000),
    "chunked prefill": Mode(20, 32, 1000),
    "preemption": Mode(20, 256, SMALL_POOL_BLOCKS),
}


def run_mode(mode: Mode, prompts: list[list[int]]) -> tuple[list[list[int]], EngineCoreStatistics]:
    """Every prompt's tokens, and the core's counts at the end."""
    config = EngineConfig(
        model="smollm2",
        device="cpu",
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=mode.at_once,
        max_num_batched_tokens=mode.max_num_batched_tokens,
        num_blocks=mode.num_blocks,
    )
    executor = TorchExecutor(config)
    ticks = count()
    core = EngineCore(config, executor.load(), num_clients=1, clock=lambda: float(next(ticks)))
    driver = CoreDriver(core, executor)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, eos_token_id=2)
    logs = []
    for index, prompt in enumerate(prompts):
        request_id = f"r{index}"
        logs.append(driver.listen(0, request_id))
        core.add(EngineCoreRequest(request_id, prompt, None, params, None, 0.0, None, None, None))
        if len(logs) % mode.at_once == 0:
            driver.run_until_idle()
    driver.run_until_idle()
    executor.shutdown()
    return [log.token_ids for log in logs], core.statistics()


@pytest.mark.parametrize(
    ("modes", "chosen"),
    [
        # One request after the other takes as long as the rest together.
        pytest.param(
            [name for name in MODES if name != "alone"],
            slice(1, None, 2),  # the longest is among them
            id="every second, in batches",
            marks=pytest.mark.slow,
        ),
        pytest.param(list(MODES), slice(None), id="all", marks=pytest.mark.soak),
    ],
)
def test_greedy_tokens_equal_those_of_transformers_in_every_mode(
    modes: list[str], chosen: slice
) -> None:
    """Twenty prompts, or fewer, in each mode; at most two of all may part, at a tie."""
    oracle = GreedyOracle()
    prompts = oracle.prompts()[chosen]
    parted: dict[str, Comparison] = {}
    # The modes agree nearly everywhere, and a comparison costs as much as the answer did.
    compared: dict[tuple[int, tuple[int, ...]], Comparison] = {}
    for name in modes:
        mode = MODES[name]
        outputs, statistics = run_mode(mode, prompts)
        assert (statistics.num_preemptions > 0) == (name == "preemption")
        for index, output in enumerate(outputs):
            key = (index, tuple(output))
            if key not in compared:
                compared[key] = oracle.compare(prompts[index], output)
            if compared[key].gap is not None:
                parted[f"{name}, prompt {index}"] = compared[key]
    wrong = {where: part for where, part in parted.items() if (part.gap or 0.0) > TIE_GAP}
    assert not wrong
    assert len(parted) <= MAX_TIES, parted
