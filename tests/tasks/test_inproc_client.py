"""The same face without sockets: an engine on tasks of this run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from trio_engine.client.inproc_client import open_inproc_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import EngineDeadError, EngineStartError, RequestError, UtilityError
from trio_engine.executor.null import NullExecutor
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trio_engine.core.plan import ExecutorProperties, StepPlan

CONFIG = EngineConfig(executor="null", num_blocks=64, max_model_len=256)
LONG = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=200, ignore_eos=True)
TEST_TIMEOUT_S = 20.0


class DoesNotLoad(NullExecutor):
    def load(self) -> ExecutorProperties:
        raise RuntimeError("no device")


class BreaksAtTheThirdPlan(NullExecutor):
    def launch(self, plan: StepPlan) -> None:
        if plan.plan_id >= 3:
            raise RuntimeError("device lost")
        super().launch(plan)


async def test_requests_and_calls() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_inproc_engine(CONFIG, NullExecutor) as engine:
            output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=5))
            assert len(output.token_ids) == 5
            assert output.finish_reason is FinishReason.LENGTH
            async with engine.generate([1], LONG, request_id="x") as stream:
                await anext(stream)
                assert engine.abort("x")
                last = [item async for item in stream][-1]
                assert last.finish_reason is FinishReason.ABORT
            assert await engine.call_utility("get_supported_tasks") == ["generate"]
            with pytest.raises(UtilityError, match="no such method"):
                await engine.call_utility("shutdown")
            with pytest.raises(RequestError, match="prompt"):
                await engine.complete([1 << 40])
            (announced,) = engine.engines.values()
            assert announced is not None
            assert announced.max_model_len == 256
            assert engine.statistics().num_requests == 0


async def test_leaving_a_stream_frees_it_in_the_core() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_inproc_engine(CONFIG, NullExecutor) as engine:
            for _ in range(20):
                async with engine.generate([1], LONG) as stream:
                    await anext(stream)
            assert await engine.call_utility("reset_prefix_cache")


async def test_an_executor_that_does_not_load() -> None:
    with trio.fail_after(TEST_TIMEOUT_S), pytest.raises(EngineStartError, match="no device"):
        await open_and_leave(DoesNotLoad)


async def open_and_leave(executor: type[NullExecutor]) -> None:
    async with open_inproc_engine(CONFIG, executor):
        pass


async def test_a_failed_step_reaches_the_callers_and_not_the_body() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_inproc_engine(CONFIG, BreaksAtTheThirdPlan) as engine:
            with pytest.raises(EngineDeadError):
                await engine.complete([1], LONG)
            assert engine.is_dead
            with pytest.raises(EngineDeadError):
                await engine.call_utility("get_supported_tasks")
            assert (await engine.wait_dead()).__cause__ is not None


async def test_the_bodys_error_and_cancellation_leave_as_they_are() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with pytest.raises(ZeroDivisionError):
            await divide_by_zero_in_body()
        with trio.CancelScope() as scope:
            async with open_inproc_engine(CONFIG, NullExecutor) as engine:
                scope.cancel()
                await engine.complete([1], LONG)
        assert scope.cancelled_caught


async def divide_by_zero_in_body() -> None:
    async with (
        open_inproc_engine(CONFIG, NullExecutor) as engine,
        engine.generate([1], LONG) as stream,
    ):
        await anext(stream)
        _ = 1 / 0
