"""Leaving blocks, over and over: no request left in the engine, nothing left of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.testing.leak_guard import take_snapshot, wait_leaks_gone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_engine.client.base import EngineClient
    from trio_engine.client.stream import RequestStream

NULL = EngineConfig(executor="null", null_step_ms=5.0)
SMOLLM2 = EngineConfig(model="smollm2", max_model_len=8192)
# Runs to max_model_len unless it is aborted: 10 s and more, also with a model of 1.2 ms a step.
LONG = SamplingParams(
    temperature=0.0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
PROMPT = [504, 3575, 282]
EMPTY_AFTER_S = 5.0
"""Half of that, and far more than an ABORT takes."""

ONCE_TIMEOUT_S = 120.0
"""For an engine's start with a model on a busy machine."""


class Left(Exception):
    """What the body raises."""


async def by_deadline(stream: RequestStream) -> None:
    with trio.move_on_after(0.02):
        async for _ in stream:
            pass


async def by_cancel(stream: RequestStream) -> None:
    with trio.CancelScope() as scope:
        async for _ in stream:
            scope.cancel()


async def by_break(stream: RequestStream) -> None:
    async for _ in stream:
        break


async def by_exception(stream: RequestStream) -> None:
    async for _ in stream:
        raise Left


WAYS = [by_deadline, by_cancel, by_break, by_exception]


async def leave_stream(
    engine: EngineClient, way: Callable[[RequestStream], Awaitable[None]]
) -> None:
    """Leaves a stream in its middle, then waits until the engine says that nothing runs."""
    try:
        async with engine.generate(PROMPT, LONG) as stream:
            await anext(stream)
            await way(stream)
    except Left:
        pass
    with trio.fail_after(EMPTY_AFTER_S):
        # Served after the ABORT, so its answer comes with the gauges that follow it.
        await engine.call_utility("is_scheduler_paused")
        while engine.statistics().scheduler[0].num_running_reqs:
            await engine.call_utility("is_scheduler_paused")
    assert engine.statistics().num_requests == 0


async def run_once(config: EngineConfig, way: Callable[[RequestStream], Awaitable[None]]) -> None:
    with trio.fail_after(ONCE_TIMEOUT_S):
        async with open_engine(config, tokenizer=None) as engine:
            await leave_stream(engine, way)


def check_scopes(config: EngineConfig, num_times: int) -> None:
    """Opens and leaves an engine again and again; each time nothing may stay behind."""
    for index in range(num_times):
        before = take_snapshot()
        trio.run(run_once, config, WAYS[index % len(WAYS)])
        assert wait_leaks_gone(before) == []


async def test_leaving_a_stream_100_times_leaves_no_request_in_the_engine() -> None:
    with trio.fail_after(120):
        async with open_engine(NULL) as engine:
            for index in range(100):
                await leave_stream(engine, WAYS[index % len(WAYS)])


@pytest.mark.parametrize(
    "num_times",
    [2, pytest.param(12, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.soak)],
)
def test_leaving_an_engine_over_and_over_leaves_nothing(num_times: int) -> None:
    check_scopes(NULL, num_times)


@pytest.mark.parametrize(
    "num_times",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.soak)],
)
def test_leaving_an_engine_with_a_model_over_and_over_leaves_nothing(num_times: int) -> None:
    check_scopes(SMOLLM2, num_times)
