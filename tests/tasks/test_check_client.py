"""``check_client`` notices clients that break a promise. Those that keep them all are elsewhere."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from trio_engine.client.inproc_client import open_inproc_engine
from trio_engine.config import EngineConfig
from trio_engine.executor.null import NullExecutor
from trio_engine.testing.check_client import check_client
from trio_engine.testing.fake_engine import FakeEngine, open_fake_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from trio_engine.client.base import EngineClient
    from trio_engine.client.outputs import RequestOutput
    from trio_engine.client.parent_request import ParentRequest
    from trio_engine.client.request import RequestSpec
    from trio_engine.core.plan import StepPlan
    from trio_engine.errors import EngineDeadError
    from trio_engine.executor.base import Executor
    from trio_engine.sampling_params import SamplingParams


class BreakableExecutor(NullExecutor):
    is_broken = False

    def launch(self, plan: StepPlan) -> None:
        if self.is_broken:
            raise RuntimeError("device lost")
        super().launch(plan)


async def test_a_client_in_the_engines_process_conforms() -> None:
    config = EngineConfig(executor="null", null_step_ms=2, max_model_len=1024)
    executors: list[BreakableExecutor] = []

    def make_executor(config: EngineConfig) -> Executor:
        executors.append(BreakableExecutor(config))
        return executors[-1]

    async def kill(_: EngineClient) -> None:
        executors[-1].is_broken = True

    await check_client(
        lambda max_in_flight: open_inproc_engine(
            config, make_executor, max_in_flight=max_in_flight
        ),
        kill_engine=kill,
    )


# Clients with one fault each


class LeavesRequestsOpen(FakeEngine):
    """leaving a stream's block does not end it"""

    def _close_request(self, request: ParentRequest) -> None:
        pass


class FindsEverybody(FakeEngine):
    """abort finds what"""

    def abort(self, request_id: str) -> bool:
        super().abort(request_id)
        return True


class AbortsNobody(FakeEngine):
    """abort does not find an open request"""

    def abort(self, request_id: str) -> bool:
        return False


class DrawsByTheHour(FakeEngine):
    """a greedy request has two answers"""

    num_asked = 0

    async def _open_request(self, spec: RequestSpec) -> ParentRequest:
        self.num_asked += 1
        assert isinstance(spec.prompt, list)
        prompt = [*(spec.prompt or [])]
        if prompt and isinstance(prompt[0], int):
            prompt[0] += self.num_asked
        return await super()._open_request(msgspec.structs.replace(spec, prompt=prompt))


class RepeatsItsLastDelta(FakeEngine):
    """deltas do not add up"""

    async def complete(self, *args: Any, **options: Any) -> RequestOutput:
        output = await super().complete(*args, **options)
        if output.num_output_tokens < 40:
            return output
        return msgspec.structs.replace(output, token_ids=[*output.token_ids, 1])


class TakesAnyPrompt(FakeEngine):
    """does not raise RequestError"""

    async def _open_request(self, spec: RequestSpec) -> ParentRequest:
        return await super()._open_request(msgspec.structs.replace(spec, prompt=spec.prompt or [1]))


class SharesItsError(FakeEngine):
    """waiters share one exception"""

    death: EngineDeadError | None = None

    async def wait_dead(self) -> EngineDeadError:
        self.death = self.death or await super().wait_dead()
        return self.death


class DoesNotKnowOfItsDeath(FakeEngine):
    """whose engine has died does not say so"""

    @property
    def is_dead(self) -> bool:
        return False


class SaysThatItIsDead(FakeEngine):
    """says (too early|that its engine has died)"""

    @property
    def is_dead(self) -> bool:
        return True


FAULTY = [
    LeavesRequestsOpen,
    FindsEverybody,
    AbortsNobody,
    DrawsByTheHour,
    RepeatsItsLastDelta,
    TakesAnyPrompt,
    SharesItsError,
    DoesNotKnowOfItsDeath,
    SaysThatItIsDead,
]


@asynccontextmanager
async def open_faulty(
    kind: type[FakeEngine], max_in_flight: int | None
) -> AsyncIterator[FakeEngine]:
    async with open_fake_engine(max_in_flight=max_in_flight) as fake:
        yield kind(fake._client, fake._tokenizer, fake._executor, fake._forward)


async def kill(client: EngineClient) -> None:
    assert isinstance(client, FakeEngine)
    client.kill()


@pytest.mark.parametrize("kind", FAULTY)
async def test_a_client_with_a_fault_is_noticed(
    kind: type[FakeEngine], autojump_clock: MockClock
) -> None:
    assert kind.__doc__ is not None
    with pytest.raises(AssertionError, match=kind.__doc__):
        await check_client(lambda limit: open_faulty(kind, limit), kill_engine=kill)


async def test_a_limit_that_is_not_kept_is_noticed(autojump_clock: MockClock) -> None:
    with pytest.raises(AssertionError, match="does not raise OverloadedError"):
        await check_client(lambda _limit: open_fake_engine())


@asynccontextmanager
async def open_swallowing(max_in_flight: int | None) -> AsyncIterator[EngineClient]:
    async with open_fake_engine(max_in_flight=max_in_flight) as engine:
        try:
            yield engine
        except Exception as error:
            raise RuntimeError("the body failed") from error


async def test_a_wrapped_error_of_the_body_is_noticed(autojump_clock: MockClock) -> None:
    with pytest.raises(AssertionError, match="leaves as another one"):
        await check_client(open_swallowing)


async def test_what_is_left_behind_is_noticed(autojump_clock: MockClock) -> None:
    left: list[int] = []

    @asynccontextmanager
    async def open_leaking(max_in_flight: int | None) -> AsyncIterator[EngineClient]:
        left.extend(os.pipe())
        async with open_fake_engine(max_in_flight=max_in_flight) as engine:
            yield engine

    with pytest.raises(AssertionError, match=r"left behind: descriptor .* pipe"):
        await check_client(open_leaking)
    for descriptor in left:
        os.close(descriptor)


async def test_a_client_that_does_not_answer_is_noticed(autojump_clock: MockClock) -> None:
    class Hangs(FakeEngine):
        async def complete_all(
            self, prompt: Any, params: SamplingParams | None = None, **options: Any
        ) -> list[RequestOutput]:
            await trio.sleep_forever()
            return []

    with pytest.raises(trio.TooSlowError):
        await check_client(lambda limit: open_faulty(Hangs, limit))
