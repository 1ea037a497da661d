"""Whatever way a caller leaves its requests, a real engine has nothing left of them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from tests.fair_time import wait_within
from tests.tasks.client_and_engine import (
    ENDLESS,
    LONG_CONFIG,
    SendGate,
    check_nothing_left,
    open_client_and_engine,
)
from tests.tasks.engine_parts import null_tokens
from trio_engine.errors import RequestError
from trio_engine.executor.null import NullExecutor
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from trio_engine.client.async_client import AsyncEngineClient
    from trio_engine.client.outputs import RequestOutput
    from trio_engine.engine.engine_core_proc import EngineCoreProc

GONE_S = 1.0
"""The promise: so long after its caller has left, the engine has nothing of a request."""


async def deltas_of(client: AsyncEngineClient) -> AsyncGenerator[RequestOutput]:
    """A caller's own generator around a stream."""
    async with client.generate([1], ENDLESS) as stream:
        async for delta in stream:
            yield delta


# Ways to leave a stream whose request runs; each returns when it has been left.


async def cancelled_while_it_waits_for_output(client: AsyncEngineClient) -> None:
    with trio.CancelScope() as scope:
        async with client.generate([1], ENDLESS) as stream, trio.open_nursery() as nursery:
            await anext(stream)
            nursery.start_soon(cancel_once_blocked, scope)
            async for _ in stream:
                pass


async def cancel_once_blocked(scope: trio.CancelScope) -> None:
    await trio.lowlevel.checkpoint()
    scope.cancel()


async def cancelled_between_two_items(client: AsyncEngineClient) -> None:
    with trio.CancelScope() as scope:
        async with client.generate([1], ENDLESS) as stream, trio.open_nursery() as nursery:
            async for _ in stream:
                nursery.start_soon(cancel_once_blocked, scope)
                await trio.sleep_forever()


async def broken_off_and_closed(client: AsyncEngineClient) -> None:
    async with contextlib.aclosing(deltas_of(client)) as deltas:
        async for _ in deltas:
            break


async def broken_off_and_dropped(client: AsyncEngineClient) -> None:
    deltas = deltas_of(client)
    async for _ in deltas:
        break
    holder = [deltas]
    del deltas
    with pytest.warns(ResourceWarning, match="deltas_of"):
        holder.clear()
    gc.collect()


async def left_by_exception(client: AsyncEngineClient) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with client.generate([1], ENDLESS) as stream:
            await anext(stream)
            _ = 1 / 0


async def left_by_a_deadline_at_the_receive(client: AsyncEngineClient) -> None:
    with trio.move_on_after(0.02):
        async with client.generate([1], ENDLESS) as stream:
            async for _ in stream:
                pass


async def left_by_a_deadline_at_the_yield(client: AsyncEngineClient) -> None:
    with trio.move_on_after(0.02):
        async with contextlib.aclosing(deltas_of(client)) as deltas:
            async for _ in deltas:
                await trio.sleep_forever()


WAYS = [
    cancelled_while_it_waits_for_output,
    cancelled_between_two_items,
    broken_off_and_closed,
    broken_off_and_dropped,
    left_by_exception,
    left_by_a_deadline_at_the_receive,
    left_by_a_deadline_at_the_yield,
]


def slow_executor() -> NullExecutor:
    """Takes ten seconds for an endless request, which so still runs when it is left."""
    return NullExecutor(msgspec.structs.replace(LONG_CONFIG, null_step_ms=1.0))


@pytest.mark.known_fault(kind="cancelled-abort")
@pytest.mark.known_fault(kind="scope-across-a-yield")
@pytest.mark.parametrize("leave", WAYS)
async def test_a_stream_that_is_left_is_gone_from_the_engine_within_a_second(
    leave: Callable[[AsyncEngineClient], Awaitable[None]],
) -> None:
    """And neither the caller's own work nor its other streams are cancelled with it."""
    async with open_client_and_engine(slow_executor(), config=LONG_CONFIG) as (client, proc):
        async with client.generate([2], ENDLESS) as other:
            await leave(client)
            await wait_within(GONE_S, lambda: wait_num_requests(client, proc, 1))
            assert (await anext(other)).token_ids
        await wait_within(GONE_S, lambda: wait_num_requests(client, proc, 0))
        await check_nothing_left(client, proc)


async def wait_num_requests(client: AsyncEngineClient, proc: EngineCoreProc, count: int) -> None:
    """Returns when both sides have so many."""
    # Nothing tells when an engine takes an ABORT.
    while client.statistics().num_requests != count or num_requests(proc) != count:  # noqa: ASYNC110
        await trio.sleep(0.001)


def num_requests(proc: EngineCoreProc) -> int:
    statistics = proc.statistics()
    assert statistics is not None
    return statistics.num_running_requests + statistics.num_waiting_requests


@pytest.mark.known_fault(kind="wrapped-error")
async def test_a_call_that_fails_in_a_callers_nursery_raises_its_error_bare() -> None:
    """So that a plain ``except`` around it works, and its neighbours go on."""
    ends: list[object] = []

    async def ask(client: AsyncEngineClient, prompt: list[int]) -> None:
        try:
            output = await client.complete(prompt, SamplingParams(max_tokens=3))
            ends.append(output.finish_reason)
        except RequestError:
            ends.append(RequestError)

    async with (
        open_client_and_engine(NullExecutor(LONG_CONFIG), config=LONG_CONFIG) as (client, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, client, [1])
        nursery.start_soon(ask, client, [])
    assert ends == [RequestError, FinishReason.LENGTH]


# Cancelled on the way to the engine


async def cancel_at_random(
    client: AsyncEngineClient, gate: SendGate, dice: random.Random, count: int
) -> None:
    """Starts requests whose messages go one by one, and cancels each at some moment."""
    num_left = 0

    async def request_and_leave() -> None:
        nonlocal num_left
        with trio.CancelScope() as scope:
            async with client.generate([1], ENDLESS) as stream, trio.open_nursery() as nursery:
                nursery.start_soon(anext, stream)
                await pause(dice, 12)
                scope.cancel()
        num_left += 1

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(request_and_leave)
            await pause(dice, 2)
            gate.let_pass()
        while num_left < count:
            await pause(dice, 3)
            gate.let_pass()


async def pause(dice: random.Random, limit: int) -> None:
    for _ in range(dice.randrange(limit)):
        await trio.lowlevel.checkpoint()


@pytest.mark.known_fault(kind="half-sent-request")
async def test_200_requests_cancelled_before_during_and_after_their_send_leave_nothing() -> None:
    gate = SendGate()
    async with open_client_and_engine(NullExecutor(LONG_CONFIG), config=LONG_CONFIG, gate=gate) as (
        client,
        proc,
    ):
        await cancel_at_random(client, gate, random.Random(7), 200)
        assert client.statistics().num_requests == 0
        assert 0 < len(gate.added_ids) < 200  # the others never went
        gate.open()
        await check_nothing_left(client, proc)
        del gate.added_ids[-1]  # of the check
        assert sorted(gate.aborted_ids) == sorted(gate.added_ids)


@pytest.mark.soak
@pytest.mark.known_fault(kind="half-sent-request")
async def test_memory_is_flat_over_10_000_requests_that_are_cancelled_on_their_way() -> None:
    gate, dice = SendGate(), random.Random(8)
    sizes = []
    async with open_client_and_engine(
        NullExecutor(LONG_CONFIG), config=LONG_CONFIG, gate=gate, timeout_s=600.0
    ) as (client, proc):
        for _ in range(50):
            gate.close()
            await cancel_at_random(client, gate, dice, 200)
            gate.open()
            await check_nothing_left(client, proc)
            gate.added_ids.clear()
            gate.aborted_ids.clear()
            gc.collect()
            sizes.append((len(gc.get_objects()), rss_mb()))
    (num_objects, mb), (num_objects_later, mb_later) = sizes[24], sizes[49]
    assert abs(num_objects_later - num_objects) < 200
    assert mb_later - mb < 4.0


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# One id again and again


@pytest.mark.known_fault(kind="late-abort")
@pytest.mark.parametrize("times", [50, pytest.param(500, marks=pytest.mark.slow)])
async def test_an_id_aborted_and_used_again_at_once_gets_its_own_end_each_time(times: int) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=2)
    async with open_client_and_engine(slow_executor(), config=LONG_CONFIG) as (client, proc):
        for _ in range(times):
            async with client.generate([1], ENDLESS, request_id="x") as first:
                await anext(first)
                assert client.abort("x")
                output = await client.complete([5], short, request_id="x")
                assert (output.token_ids, output.finish_reason) == (
                    null_tokens(2, [5]),
                    FinishReason.LENGTH,
                )
                (last,) = [item async for item in first]
                assert last.finish_reason is FinishReason.ABORT
        await check_nothing_left(client, proc)
