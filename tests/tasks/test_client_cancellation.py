"""Phase of a request x way to leave it: the engine gets one ABORT, or never the ADD.

Every test ends with ``check_all_aborted``: each request that reached the engine was aborted
exactly once, and the client's tables and outbox are empty.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.wire_pair import TEST_TIMEOUT_S, check_all_aborted, fence, open_pair
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient
    from trio_engine.client.outputs import RequestOutput
    from trio_engine.client.stream import RequestStream
    from trio_engine.testing.wire_engine import ScriptedWireEngine

ENDLESS = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=1000, ignore_eos=True)


class BodyError(Exception):
    """What a caller's code raises."""


async def wait_for_first_token(
    stream: RequestStream, wire: ScriptedWireEngine, reached: trio.Event
) -> None:
    await wire.receive_add()
    reached.set()
    await anext(stream)


async def wait_mid_stream(
    stream: RequestStream, wire: ScriptedWireEngine, reached: trio.Event
) -> None:
    await wire.send_tokens((await wire.receive_add()).request_id, [7])
    await anext(stream)
    reached.set()
    await anext(stream)


async def sleep_between_items(
    stream: RequestStream, wire: ScriptedWireEngine, reached: trio.Event
) -> None:
    await wire.send_tokens((await wire.receive_add()).request_id, [7])
    async for _ in stream:
        reached.set()
        await trio.sleep_forever()


async def sleep_before_reading(
    stream: RequestStream, wire: ScriptedWireEngine, reached: trio.Event
) -> None:
    reached.set()
    await trio.sleep_forever()


Phase = Callable[["RequestStream", "ScriptedWireEngine", trio.Event], Awaitable[None]]
PHASES = [wait_for_first_token, wait_mid_stream, sleep_between_items, sleep_before_reading]


@pytest.mark.known_fault(kind="scope-across-a-yield")
@pytest.mark.known_fault(kind="cancelled-abort")
@pytest.mark.parametrize("way", ["cancel", "deadline"])
@pytest.mark.parametrize("phase", PHASES)
async def test_cancelled_from_outside(phase: Phase, way: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            reached, scope = trio.Event(), trio.CancelScope()

            async def use() -> None:
                with scope:
                    async with client.generate([1], ENDLESS) as stream:
                        await phase(stream, wire, reached)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(use)
                await reached.wait()
                await wait_all_tasks_blocked()
                if way == "cancel":
                    scope.cancel("the caller has lost interest")
                else:
                    scope.deadline = trio.current_time()
            assert scope.cancelled_caught
            await check_all_aborted(client, wire)
            assert len(wire.added_ids) == 1


@pytest.mark.known_fault(kind="scope-across-a-yield")
@pytest.mark.parametrize("way", ["leave", "raise"])
@pytest.mark.parametrize("phase", PHASES)
async def test_left_while_a_task_inside_the_block_uses_it(phase: Phase, way: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            reached = trio.Event()
            try:
                async with client.generate([1], ENDLESS) as stream, trio.open_nursery() as nursery:
                    nursery.start_soon(phase, stream, wire, reached)
                    await reached.wait()
                    await wait_all_tasks_blocked()
                    if way == "raise":
                        raise BodyError
                    nursery.cancel_scope.cancel()
            except* BodyError:
                assert way == "raise"
            await check_all_aborted(client, wire)
            assert len(wire.added_ids) == 1


@pytest.mark.known_fault(kind="cancelled-abort")
async def test_break() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with client.generate([1], ENDLESS) as stream:
                await wire.send_tokens((await wire.receive_add()).request_id, [7])
                async for _ in stream:
                    break
            await check_all_aborted(client, wire)
            assert len(wire.added_ids) == 1


@pytest.mark.known_fault(kind="half-sent-request")
async def test_cancelled_on_entering_sends_nothing() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            with trio.CancelScope() as scope:
                scope.cancel()
                async with client.generate([1], ENDLESS):
                    raise AssertionError("entered")  # pragma: no cover
            await check_all_aborted(client, wire)
            assert wire.added_ids == []


@pytest.mark.known_fault(kind="half-sent-request")
@pytest.mark.parametrize("way", ["leave", "raise"])
async def test_left_before_the_writer_has_run_the_add_never_goes(way: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            with contextlib.suppress(BodyError):
                async with client.generate([1], ENDLESS):
                    assert client.statistics().num_unsent == 1
                    if way == "raise":
                        raise BodyError
            await check_all_aborted(client, wire)
            assert wire.added_ids == []


async def test_cancelled_complete_aborts() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.complete, [1], ENDLESS)
                await wire.receive_add()
                nursery.cancel_scope.cancel()
            await check_all_aborted(client, wire)
            assert len(wire.added_ids) == 1


@pytest.mark.known_fault(kind="silent-death")
@pytest.mark.parametrize("way", ["cancel", "deadline", "exception"])
async def test_utility_call_left_pending_is_forgotten_and_its_answer_ignored(way: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            with trio.CancelScope() as scope:
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(client.call_utility, "sleep", 1)
                        call = await wire.receive_utility()
                        if way == "exception":
                            raise BodyError
                        if way == "deadline":
                            scope.deadline = trio.current_time()
                        else:
                            scope.cancel()
                except* BodyError:
                    assert way == "exception"
            assert client.statistics().num_utility_calls == 0
            await wire.answer(call, None)
            await check_all_aborted(client, wire)


async def test_utility_call_cancelled_before_it_left_never_goes() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            with trio.CancelScope() as scope:
                scope.cancel()
                await client.call_utility("sleep", 1)
            await check_all_aborted(client, wire)
            assert [message.method for message in wire.received] == ["is_sleeping"]  # type: ignore[union-attr]


async def deltas_of(client: EngineClient) -> AsyncGenerator[RequestOutput | None, None]:
    """A caller's own generator around a stream, with an item before the first token."""
    async with client.generate([1], ENDLESS) as stream:
        yield None
        async for delta in stream:
            yield delta


@pytest.mark.known_fault(kind="cancelled-abort")
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_callers_generator_closed(num_tokens: int) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with contextlib.aclosing(deltas_of(client)) as deltas:
                await start_generator(deltas, wire, num_tokens)
            await check_all_aborted(client, wire)


@pytest.mark.known_fault(kind="cancelled-abort")
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_callers_generator_dropped(num_tokens: int) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            deltas = deltas_of(client)
            await start_generator(deltas, wire, num_tokens)
            holder = [deltas]
            del deltas
            with pytest.warns(ResourceWarning, match="deltas_of"):
                holder.clear()
            await wait_all_tasks_blocked()  # Trio closes it in a task of its own
            await check_all_aborted(client, wire)


async def start_generator(
    deltas: AsyncIterator[RequestOutput | None], wire: ScriptedWireEngine, num_tokens: int
) -> None:
    await anext(deltas)
    if num_tokens:
        await wire.send_tokens((await wire.receive_add()).request_id, [7])
        await anext(deltas)


@pytest.mark.known_fault(kind="cancelled-abort")
async def test_stream_entered_by_hand_and_dropped_warns_and_aborts() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            stream = client.generate([1], ENDLESS)
            await stream.__aenter__()
            await wire.receive_add()
            holder = [stream]
            del stream
            with pytest.warns(ResourceWarning, match="dropped without leaving"):
                holder.clear()
            await wire.receive_abort()
            await check_all_aborted(client, wire)


@pytest.mark.known_fault(kind="half-sent-request")
async def test_200_requests_cancelled_at_random_while_the_engine_does_not_read() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            wire.pause_reading()

            async def request_and_cancel(delay_s: float) -> None:
                with trio.move_on_after(delay_s):
                    await client.complete([1], ENDLESS)

            chance = random.Random(2)
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(request_and_cancel, chance.uniform(0.0, 0.002))
            assert client.statistics().num_requests == 0
            wire.resume_reading()
            await check_all_aborted(client, wire)


@pytest.mark.known_fault(kind="late-abort")
@pytest.mark.parametrize("times", [20, pytest.param(500, marks=pytest.mark.slow)])
async def test_an_id_used_again_at_once_is_not_hit_by_the_abort_before(times: int) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            for _ in range(times):
                async with client.generate([1], ENDLESS, request_id="x") as first:
                    first_id = (await wire.receive_add()).request_id
                    assert client.abort("x")
                    async with client.generate([2], ENDLESS, request_id="x") as second:
                        second_id = (await wire.receive_add()).request_id
                        await wire.send_tokens(first_id, [8])  # was on its way
                        await wire.send_tokens(second_id, [9], FinishReason.LENGTH)
                        outputs = [output async for output in second]
                    assert [output.token_ids for output in outputs] == [[9]]
                    assert outputs[0].finish_reason is FinishReason.LENGTH
                    last = [output async for output in first]
                    assert [output.token_ids for output in last] == [[]]
            await fence(client, wire)
            assert len(wire.aborted_ids) == times
            assert len(set(wire.added_ids)) == 2 * times
            assert set(wire.aborted_ids) == set(wire.added_ids[::2])


@pytest.mark.known_fault(kind="scope-across-a-yield")
async def test_streams_interleave_in_one_task_and_a_deadline_of_one_spares_the_other() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], ENDLESS) as one:
            one_id = (await wire.receive_add()).request_id
            with trio.CancelScope() as scope:
                async with client.generate([2], ENDLESS) as two:
                    two_id = (await wire.receive_add()).request_id
                    await wire.send_tokens(two_id, [2])
                    await wire.send_tokens(one_id, [1])
                    assert (await anext(two)).token_ids == [2]
                    assert (await anext(one)).token_ids == [1]
                    scope.deadline = trio.current_time() + 0.01
                    await anext(two)
            assert scope.cancelled_caught
            assert await wire.receive_abort() == [two_id]
            await wire.send_tokens(one_id, [3])
            assert (await anext(one)).token_ids == [3]


@pytest.mark.known_fault(kind="scope-across-a-yield")
async def test_a_stream_may_be_left_in_another_task_than_it_was_entered_in() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            stream = client.generate([1], ENDLESS)
            await stream.__aenter__()
            await wire.send_tokens((await wire.receive_add()).request_id, [7])

            async def finish() -> None:
                assert (await anext(stream)).token_ids == [7]
                await stream.__aexit__(None, None, None)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(finish)
            await check_all_aborted(client, wire)
            assert len(wire.added_ids) == 1
