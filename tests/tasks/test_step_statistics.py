"""The phases of steps in the statistics of a running engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.tasks.engine_parts import open_engine_beside
from trio_engine import EngineConfig, SamplingParams
from trio_engine.client.inproc_client import open_inproc_engine
from trio_engine.core.step_phases import TIMED_TURN
from trio_engine.executor.null import NullExecutor

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 6 * TIMED_TURN


async def test_an_engine_tells_where_the_time_of_its_steps_went() -> None:
    config = EngineConfig(executor="null", null_step_ms=1.0)
    async with open_inproc_engine(config, NullExecutor) as engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        await engine.complete([1, 2, 3], params)
        statistics = await engine.engine_statistics()
    assert (statistics.num_steps, statistics.num_running_requests) == (NUM_TOKENS, 0)
    steps = statistics.steps
    assert steps is not None
    assert steps.num_steps == NUM_TOKENS
    assert steps.device_busy_s >= 0.001 * NUM_TOKENS
    assert steps.bubble_s > 0
    assert 0 < steps.bubble_share < 1
    assert steps.phases["forward"].num_timed == NUM_TOKENS
    for name in ("plan", "settle", "wait"):
        assert 0 < steps.phases[name].num_timed <= NUM_TOKENS + 2
        assert steps.phases[name].total_s > 0


async def test_a_trace_is_written_when_the_engine_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    config = EngineConfig(executor="null", null_step_ms=1.0, trace=str(path))
    async with open_inproc_engine(config, NullExecutor) as engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        await engine.complete([1, 2, 3], params)
        assert path.read_text() == ""
    events = json.loads(path.read_text())["traceEvents"]
    forward = [event for event in events if event["name"] == "forward"]
    assert [event["args"]["tokens"] for event in forward] == [3] + [1] * (NUM_TOKENS - 1)
    assert all(event["dur"] >= 1000 for event in forward)


async def test_an_engine_behind_sockets_tells_what_its_writers_did() -> None:
    config = EngineConfig(executor="null", null_step_ms=1.0)
    async with open_engine_beside(NullExecutor, config=config) as (front_end, proc):
        await front_end.add("x", [1, 2, 3], max_tokens=NUM_TOKENS, ignore_eos=True)
        await front_end.finish("x")
        statistics = proc.statistics()
    assert statistics is not None
    steps = statistics.steps
    assert steps is not None
    assert steps.num_steps == NUM_TOKENS
    for name in ("encode", "send"):
        assert 0 < steps.phases[name].num_timed <= NUM_TOKENS
        assert steps.phases[name].total_s > 0
