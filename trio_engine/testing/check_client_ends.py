"""The part of ``check_client`` about limits and ends: closed clients, dead engines, errors.

Public kit. Imports neither torch nor zmq nor pytest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import trio
from trio.lowlevel import checkpoint

from trio_engine.client.base import EngineClient
from trio_engine.errors import EngineClosedError, EngineDeadError, OverloadedError
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

OpenClient = Callable[[int | None], AbstractAsyncContextManager[EngineClient]]
"""Opens a client with the given ``max_in_flight``."""

KillEngine = Callable[[EngineClient], Awaitable[object]]
"""Has the engine of an open client die, as by SIGKILL or a failed step."""

SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(
    temperature=0.0, max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
"""Runs until it is ended, or ``max_model_len``."""

NEWS_S = 2.0
"""The promise for every waiter of an engine that has died."""

MAX_IN_FLIGHT = 2
NUM_STREAMS = 3


class MadeUpError(Exception):
    """Of a body: nobody but the check may catch it."""


async def check_nothing_held(client: EngineClient) -> None:
    """Client and, as far as it tells, engine hold nothing, at once or in a moment."""
    statistics = client.statistics()
    assert statistics.num_requests == 0, f"requests are left: {statistics}"
    assert statistics.num_utility_calls == 0, f"calls are left: {statistics}"
    while statistics.num_unsent or any(
        stats.num_running_reqs or stats.num_waiting_reqs for stats in statistics.scheduler.values()
    ):
        await trio.sleep(0.01)  # until an ABORT has arrived and the engine has told of it
        statistics = client.statistics()


async def check_limit(open_client: OpenClient) -> None:
    """``max_in_flight`` requests are open at most; one that ends makes room."""
    async with open_client(MAX_IN_FLIGHT) as client:
        async with client.generate([1], LONG), client.generate([2], LONG):
            await _expect(OverloadedError, client.complete([3], SHORT))
            statistics = client.statistics()
            assert statistics.num_requests == MAX_IN_FLIGHT, f"over the limit: {statistics}"
        assert (await client.complete([3], SHORT)).finished, "room is not given back"
        await check_nothing_held(client)


async def check_closing(open_client: OpenClient) -> None:
    """The end of the block wakes every waiter, and is no death."""
    async with trio.open_nursery() as nursery:
        async with open_client(None) as client:
            await _start_waiters(nursery, client, EngineClosedError)
        for call in _later_calls(client):
            await _expect(EngineClosedError, call())
        assert not client.is_dead, "a client that was closed says that its engine has died"
        assert not client.abort("x"), "abort finds something after the end"


async def check_death(open_client: OpenClient, kill_engine: KillEngine) -> None:
    """An engine that dies wakes every waiter within 2 s, and does not cancel the body."""
    async with open_client(None) as client:
        async with trio.open_nursery() as nursery:
            await _start_waiters(nursery, client, EngineDeadError)
            assert not client.is_dead, "a client says too early that its engine has died"
            await kill_engine(client)
            with trio.fail_after(NEWS_S):
                one, two = await client.wait_dead(), await client.wait_dead()
            nursery.cancel_scope.deadline = trio.current_time() + NEWS_S
        assert not nursery.cancel_scope.cancelled_caught, "not everybody hears of the death"
        assert one is not two, "waiters share one exception, and with it their tracebacks"
        assert client.is_dead, "a client whose engine has died does not say so"
        for call in _later_calls(client)[:-1]:
            await _expect(EngineDeadError, call())
        statistics = client.statistics()
        assert statistics.num_requests == statistics.num_utility_calls == 0, statistics
        assert not client.abort("x"), "abort finds something after the death"
        await checkpoint()  # raises if the body was cancelled


async def check_body_errors(open_client: OpenClient) -> None:
    """An error of the body leaves as it was raised, a cancellation as one."""
    error, left = MadeUpError(), None
    try:
        async with open_client(None) as client, client.generate([1], LONG) as stream:
            await anext(stream)
            raise error
    except Exception as caught:
        left = caught
    assert left is error, f"an error of the body leaves as another one: {left!r}"
    with trio.CancelScope() as scope:
        async with open_client(None) as client:
            scope.cancel()
            await client.complete([1], LONG)
    assert scope.cancelled_caught, "a client swallows a cancellation"


async def _start_waiters(
    nursery: trio.Nursery, client: EngineClient, error: type[Exception]
) -> None:
    """One of each kind, which wait when this returns; each must get the error."""
    started = [trio.Event() for _ in range(NUM_STREAMS)]

    async def stream(event: trio.Event) -> None:
        async with client.generate([1], LONG) as stream:
            await anext(stream)
            event.set()
            async for _ in stream:
                pass

    for event in started:
        nursery.start_soon(_expect, error, stream(event))
    nursery.start_soon(_expect, error, client.complete([2], LONG))
    if error is EngineClosedError:
        nursery.start_soon(_expect, error, client.wait_dead())
    for event in started:
        await event.wait()
    # Pends as long as the streams run, so it must be the last to start.
    nursery.start_soon(_expect, error, client.call_utility("pause_scheduler", "wait"))
    while client.statistics().num_utility_calls == 0:  # noqa: ASYNC110  # a count, not an event
        await trio.sleep(0.001)


def _later_calls(client: EngineClient) -> list[Callable[[], Awaitable[Any]]]:
    return [
        partial(client.complete, [1], SHORT),
        partial(client.call_utility, "get_supported_tasks"),
        client.wait_dead,
    ]


async def _expect(error: type[Exception], call: Awaitable[Any]) -> None:
    try:
        await call
    except error:
        return
    raise AssertionError(f"{call} does not raise {error.__name__}")
