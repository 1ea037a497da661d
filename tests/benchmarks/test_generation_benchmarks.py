"""The benchmarks of scheduling, caching and grammars, small: what must hold at any speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.benchmarks import (
    prefix_cache,
    quantization,
    scheduler_cost,
    structured,
    structured_schemas,
)
from tests.benchmarks.figures import Report
from tests.model.decoding import NEEDS_INT4
from trio_engine.checkpoint import locate_model
from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from trio_engine.config import SchedulingPolicy


@pytest.fixture
def needs_smollm2() -> None:
    try:
        locate_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_step_is_that_of_the_running_requests(policy: SchedulingPolicy) -> None:
    core = scheduler_cost.CoreUnderLoad(40, policy)
    core.run(5)
    assert len(core.schedule_s) == len(core.update_s) == 5
    counts = core.core.statistics()
    assert counts.num_running_requests == scheduler_cost.NUM_RUNNING
    assert counts.num_waiting_requests == 40


@NEEDS_INT4
@pytest.mark.slow
@pytest.mark.usefixtures("needs_smollm2")
def test_each_kind_of_weights_is_timed_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rounds=2", "--requests=1,2", "--prompt-tokens=40", "--sequences=3"]
    assert quantization.main(sizes) == 0
    output = capsys.readouterr().out
    for kind in ("int8", "int4"):
        for load in ("decode, 1 requests", "decode, 2 requests", "prefill, 40 tokens"):
            assert f"{load}: {kind} is faster" in output
        assert f"{kind}: mean divergence" in output


@pytest.mark.slow
@pytest.mark.usefixtures("needs_smollm2")
async def test_a_repeated_prompt_is_computed_but_for_its_last_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await prefix_cache.measure_model(70, 1, Report("small"))
    assert "of the second call's tokens 64 were cached" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("needs_smollm2")
async def test_free_and_structured_rows_both_run(capsys: pytest.CaptureFixture[str]) -> None:
    await structured.measure(Report("small"), num_rows=3, step_ms=1.0, num_tokens=10)
    shown = capsys.readouterr().out.splitlines()
    rates = [float(line.split()[-2]) for line in shown if line.endswith("tokens/s")]
    assert len(rates) == 2
    assert min(rates) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("needs_smollm2")
async def test_outputs_follow_random_schemas() -> None:
    config = msgspec.structs.replace(structured_schemas.CONFIG, num_blocks=512)
    outcome, _ = await structured_schemas.run(num_schemas=2, seed=0, temperature=1.0, config=config)
    assert outcome.faults == []
    assert outcome.ends == {"stop": 2}
