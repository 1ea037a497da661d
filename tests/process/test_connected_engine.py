"""An engine that somebody else started: its client hears of its end, whatever end that is."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fair_time import wait_within
from tests.process.engine_programs import (
    LOAD_FAILS,
    STEP_FAILS,
    engine_command,
    scripted_command,
)
from trio_engine.client.launcher import connect_engine
from trio_engine.errors import EngineDeadError, EngineStartError
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.transport.ipc import IpcDirectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from trio_engine.client.base import EngineClient
    from trio_engine.client.stream import RequestStream

TEST_TIMEOUT_S = 100.0
NEWS_S = 2.0
"""The promise for every waiter of an engine that has died."""

LONG = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=2000, ignore_eos=True)

HEADLESS = """
def __init__(self, *args, **options):
    from trio_engine.engine.engine_core_proc import EngineIdentity

    identity = EngineIdentity(local=False, headless=True)
    super().__init__(*args, identity=identity, **options)
"""


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with IpcDirectory() as directory:
        if request.param == "ipc":
            yield directory.address("handshake")
            return
        with socket.socket() as reserved:
            # As it does not listen, another socket with this option may. Nobody else gets the port.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            yield f"tcp://127.0.0.1:{reserved.getsockname()[1]}"


@asynccontextmanager
async def open_process(command: list[str], address: str) -> AsyncIterator[trio.Process]:
    process = await trio.lowlevel.open_process(
        [*command, f"--handshake-address={address}"], stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()


@asynccontextmanager
async def open_connected(
    address: str, *options: str
) -> AsyncIterator[tuple[EngineClient, trio.Process]]:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_process(engine_command("--headless", "--null-step-ms=2", *options), address) as p,
            connect_engine(address) as engine,
        ):
            yield engine, p


async def expect_death(engine: EngineClient) -> None:
    with pytest.raises(EngineDeadError, match="without a word"):
        await engine.complete([1], LONG)


async def expect_death_in_stream(stream: RequestStream) -> None:
    with pytest.raises(EngineDeadError, match="without a word"):
        async for _ in stream:
            pass


async def expect_death_in_call(engine: EngineClient) -> None:
    # Waits until nothing runs, so it pends as long as the stream.
    with pytest.raises(EngineDeadError, match="without a word"):
        await engine.call_utility("pause_scheduler", "wait")


@pytest.mark.slow
async def test_one_that_is_killed_while_idle_is_dead_within_2_s(address: str) -> None:
    async with open_connected(address) as (engine, process):
        await engine.complete([1], SamplingParams(max_tokens=1))
        process.kill()
        death = await wait_within(NEWS_S, engine.wait_dead)
        assert engine.is_dead
        assert not death.was_asked_to_stop  # as far as anybody knows
        with pytest.raises(EngineDeadError):
            await engine.complete([1])


@pytest.mark.slow
async def test_one_that_is_killed_wakes_every_kind_of_waiter_within_2_s(address: str) -> None:
    async with (
        open_connected(address) as (engine, process),
        engine.generate([1], LONG) as stream,
    ):
        await anext(stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_death_in_stream, stream)
            nursery.start_soon(expect_death_in_call, engine)
            nursery.start_soon(expect_death, engine)
            await wait_all_tasks_blocked()
            process.kill()
            await wait_within(NEWS_S, engine.wait_dead)  # the others hear of it at once


@pytest.mark.slow
async def test_one_that_is_asked_to_stop_says_so_to_every_request(address: str) -> None:
    """The end of its connections must not overtake the end of the requests."""
    async with open_connected(address) as (engine, process):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(expect_abort, engine)
            async with engine.generate([1], LONG) as stream:
                await anext(stream)
                await engine.call_utility("is_sleeping")  # behind the others' requests
                process.send_signal(signal.SIGTERM)
                assert [item async for item in stream][-1].finish_reason is FinishReason.ABORT
        await wait_within(NEWS_S, engine.wait_dead)


async def expect_abort(engine: EngineClient) -> None:
    assert (await engine.complete([1], LONG)).finish_reason is FinishReason.ABORT


@pytest.mark.slow
async def test_leaving_is_no_death(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async with open_connected(address) as (engine, process):
        await engine.complete([1], SamplingParams(max_tokens=1))
        process.send_signal(signal.SIGSTOP)  # nor is silence
        await wait_all_tasks_blocked(0.2)
        assert not engine.is_dead
        process.send_signal(signal.SIGCONT)
        await engine.complete([1], SamplingParams(max_tokens=1))
    assert "engine_dead" not in caplog.text


@pytest.mark.slow
async def test_the_last_word_counts_before_the_end_of_the_connection(address: str) -> None:
    command = scripted_command(executor=STEP_FAILS, proc=HEADLESS)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_process(command, address), connect_engine(address) as engine:
            with pytest.raises(EngineDeadError, match="reported a fatal error"):
                await engine.complete([1])


@pytest.mark.slow
async def test_one_that_does_not_load_is_a_start_error_at_once(address: str) -> None:
    command = scripted_command(executor=LOAD_FAILS, proc=HEADLESS)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_process(command, address):
            with pytest.raises(EngineStartError, match="left before it was ready"):
                await connect_and_leave(address)


async def connect_and_leave(address: str) -> None:
    async with connect_engine(address):
        pass
