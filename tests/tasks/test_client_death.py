"""When the engine dies every waiter of every kind hears of it, and so does every later call."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fair_time import wait_within
from tests.tasks.wire_pair import TEST_TIMEOUT_S, check_all_aborted, fence, open_pair
from trio_engine.client.front_end import open_front_end
from trio_engine.client.launcher import connect_engine
from trio_engine.client.service_tasks import open_service_tasks
from trio_engine.client.wire_client import open_wire_client
from trio_engine.errors import EngineClosedError, EngineDeadError
from trio_engine.outputs import EngineCoreOutputs, FinishReason, UtilityOutput
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.testing.wire_engine import open_scripted_engine
from trio_engine.text.processor import TextProcessor
from trio_engine.transport.ipc import IpcDirectory
from trio_engine.wire.handshake import ExpectedEngine

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from trio_engine.client.async_client import AsyncEngineClient
    from trio_engine.client.base import EngineClient
    from trio_engine.client.front_end import FrontEnd
    from trio_engine.client.service_tasks import ServiceTasks
    from trio_engine.testing.wire_engine import ScriptedWireEngine
    from trio_engine.wire.messages import ReadyResponse

DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=100)


async def expect_death_everywhere(
    client: AsyncEngineClient, wire: ScriptedWireEngine, nursery: trio.Nursery
) -> None:
    """Starts one waiter of each kind; the nursery ends when all have heard of the death."""

    async def stream() -> None:
        async with client.generate([1], DELTA) as stream:
            with pytest.raises(EngineDeadError):
                await anext(stream)

    async def complete() -> None:
        with pytest.raises(EngineDeadError):
            await client.complete([2])

    async def utility() -> None:
        with pytest.raises(EngineDeadError):
            await client.call_utility("is_sleeping")

    async def supervise() -> None:
        assert isinstance(await client.wait_dead(), EngineDeadError)

    for waiter in (stream, stream, complete, utility, supervise):
        nursery.start_soon(waiter)
    await wire.wait_num_received(4)
    await wait_all_tasks_blocked()


async def check_dead(client: AsyncEngineClient) -> None:
    assert client.is_dead
    assert client.statistics().num_requests == 0
    assert client.statistics().num_utility_calls == 0
    with pytest.raises(EngineDeadError):
        await client.complete([1])
    with pytest.raises(EngineDeadError):
        await client.call_utility("is_sleeping")
    assert isinstance(await client.wait_dead(), EngineDeadError)
    assert not client.abort("x")


@pytest.mark.known_fault(kind="silent-death")
async def test_its_last_word_reaches_everybody() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with trio.open_nursery() as nursery:
                await expect_death_everywhere(client, wire, nursery)
                await wire.send_dead()
            await check_dead(client)


async def test_tokens_before_the_last_word_are_given_out_first() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], DELTA) as stream:
            await wire.send_tokens((await wire.receive_add()).request_id, [7])
            await wire.send_dead()
            await client.wait_dead()
            assert (await anext(stream)).token_ids == [7]
            with pytest.raises(EngineDeadError, match="reported a fatal error"):
                await anext(stream)


@pytest.mark.known_fault(kind="silent-death")
async def test_a_request_that_was_not_sent_yet_fails_too() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, _), client.generate([1], DELTA) as stream:
            client.die(EngineDeadError("its process ended", exit_status=-9, stderr_tail="boom"))
            with pytest.raises(EngineDeadError, match="its process ended") as caught:
                await anext(stream)
            assert (caught.value.exit_status, caught.value.stderr_tail) == (-9, "boom")


async def test_one_that_leaves_without_a_word_is_noticed_while_nobody_sends() -> None:
    with trio.fail_after(TEST_TIMEOUT_S), IpcDirectory() as directory:
        address = directory.address("handshake")
        async with trio.open_nursery() as nursery:
            may_go = trio.Event()

            async def engine() -> None:
                async with open_scripted_engine(address):
                    await may_go.wait()

            nursery.start_soon(engine)
            async with connect_engine(address) as client:
                may_go.set()
                assert "without a word" in str(await wait_within(2.0, client.wait_dead))


async def test_a_message_to_one_that_has_left_tells_it_too() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_front_end("tcp://127.0.0.1:0") as front_end, open_service_tasks() as tasks:
            async with open_scripted_engine(front_end.handshake_address):
                engines = await front_end.wait_engines_ready([ExpectedEngine(0, local=False)])
            async with open_client(front_end, engines, tasks) as client:
                while not client.is_dead:
                    with trio.move_on_after(0.05), pytest.raises(EngineDeadError):
                        await client.complete([1])
                with pytest.raises(EngineDeadError, match="connection is gone"):
                    await client.complete([1])


@pytest.mark.known_fault(kind="silent-death")
async def test_the_receivers_own_end_is_a_death() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_front_end("tcp://127.0.0.1:0") as front_end,
            open_service_tasks() as tasks,
            open_scripted_engine(front_end.handshake_address) as wire,
        ):
            engines = await front_end.wait_engines_ready([ExpectedEngine(0, local=False)])
            async with open_client(front_end, engines, tasks) as client:
                async with trio.open_nursery() as nursery:
                    await expect_death_everywhere(client, wire, nursery)
                    front_end.output.close()
                await check_dead(client)


def open_client(
    front_end: FrontEnd, engines: dict[int, ReadyResponse | None], tasks: ServiceTasks
) -> AbstractAsyncContextManager[AsyncEngineClient]:
    async def explain(noticed: str) -> EngineDeadError:
        return EngineDeadError(noticed)

    return open_wire_client(
        front_end,
        engines,
        TextProcessor(None, max_model_len=64),
        max_in_flight=None,
        explain_death=explain,
        tasks=tasks,
    )


async def test_death_does_not_cancel_the_body_and_each_waiter_has_its_own_error() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            await wire.send_dead()
            one, two = await client.wait_dead(), await client.wait_dead()
            await trio.lowlevel.checkpoint()
            assert one is not two


@pytest.mark.known_fault(kind="silent-death")
async def test_late_unknown_and_malformed_answers_are_survived(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], DELTA) as stream:
            request = await wire.receive_add()
            with caplog.at_level(logging.WARNING, "trio_engine"):
                await wire.send(EngineCoreOutputs(utility_output=UtilityOutput(42, "late")))
                await wire.send_frames([b"\xc1 no msgpack"])
                await wire.send_frames([b""])
                await wire.send_tokens("unknown", [1], FinishReason.STOP)
                await wire.send_tokens(request.request_id, [7])
                assert (await anext(stream)).token_ids == [7]
            assert "output_undecodable" in caplog.text
            await fence(client, wire)


async def test_closing_ends_what_other_tasks_wait_for_and_aborts_it() -> None:
    heard = []

    async def complete(client: EngineClient) -> None:
        with pytest.raises(EngineClosedError):
            await client.complete([1])
        heard.append("complete")

    async def supervise(client: EngineClient) -> None:
        with pytest.raises(EngineClosedError):
            await client.wait_dead()
        heard.append("wait_dead")

    async def call(client: EngineClient) -> None:
        with pytest.raises(EngineClosedError):
            await client.call_utility("is_sleeping")
        heard.append("utility")

    with trio.fail_after(TEST_TIMEOUT_S), IpcDirectory() as directory:
        address = directory.address("handshake")
        async with open_scripted_engine(address) as wire, trio.open_nursery() as nursery:
            async with connect_engine(address) as client:
                for waiter in (complete, supervise, call):
                    nursery.start_soon(waiter, client)
                await wire.wait_num_received(2)
            with pytest.raises(EngineClosedError):
                await client.complete([1])
            assert not client.is_dead
            assert await wire.receive_abort() == wire.added_ids
    assert sorted(heard) == ["complete", "utility", "wait_dead"]


@pytest.mark.known_fault(kind="wrapped-error")
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
async def test_the_bodys_error_leaves_as_it_was_raised(error: BaseException) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with pytest.raises(type(error)) as caught:
            await raise_in_body(error)
        assert caught.value is error


async def raise_in_body(error: BaseException) -> None:
    async with open_pair():
        raise error


def test_ctrl_c_reaches_the_body_and_the_abort_still_goes() -> None:
    async def main() -> None:
        async with open_pair() as (client, wire):
            try:
                async with client.generate([1], DELTA):
                    await wire.receive_add()
                    signal.raise_signal(signal.SIGINT)
                    await trio.sleep(TEST_TIMEOUT_S)
            except KeyboardInterrupt:
                await check_all_aborted(client, wire)
                raise

    # In a background job of a shell it may be ignored, and then Trio leaves it alone.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trio.run(main)
    finally:
        signal.signal(signal.SIGINT, before)
