"""Client and engine process together, with the executor that runs no model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.process.processes import child_pids, wait_ended
from trio_engine.client.launcher import connect_engine, open_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import EngineDeadError, EngineStartError, RequestFailedError
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.transport.ipc import IpcDirectory

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient
    from trio_engine.client.stream import RequestStream

TEST_TIMEOUT_S = 30.0
NULL = EngineConfig(executor="null", null_step_ms=1.0, num_blocks=64, max_model_len=256)
LONG = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=200, ignore_eos=True)


async def test_requests_utilities_and_an_orderly_end() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(NULL) as engine:
            output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=5))
            assert len(output.token_ids) == 5
            assert output.finish_reason is FinishReason.LENGTH
            assert output.num_cached_tokens == 0
            async with engine.generate([1], LONG) as stream:
                async for delta in stream:
                    if delta.num_output_tokens > 3:
                        break
            assert await engine.call_utility("get_supported_tasks") == ["generate"]


@pytest.mark.slow
async def test_a_request_that_the_engine_refuses_fails() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(NULL) as engine:
            with pytest.raises(RequestFailedError):
                await engine.complete([1 << 40])
            assert (await engine.complete([1], SamplingParams(max_tokens=1))).finished


@pytest.mark.slow
async def test_sigkill_reaches_every_kind_of_waiter() -> None:
    before = child_pids()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(NULL) as engine:
            (pid,) = child_pids() - before
            async with engine.generate([1], LONG) as running, trio.open_nursery() as nursery:
                await anext(running)
                # Waits until nothing runs, so it pends as long as the stream.
                nursery.start_soon(expect_death_in_call, engine)
                # Not admitted while paused.
                nursery.start_soon(expect_death, engine)
                await wait_all_tasks_blocked()
                os.kill(pid, signal.SIGKILL)
                nursery.start_soon(expect_death, engine)  # not sent yet
                with trio.fail_after(2.0):
                    death = await engine.wait_dead()
                    assert death.exit_status == -signal.SIGKILL
                    assert not death.was_asked_to_stop
                with pytest.raises(EngineDeadError):
                    await read_all(running)


async def read_all(stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def expect_death(engine: EngineClient) -> None:
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await engine.complete([1], LONG)


async def expect_death_in_call(engine: EngineClient) -> None:
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await engine.call_utility("pause_scheduler", "wait")


@pytest.mark.slow
async def test_sigterm_from_outside_is_a_stop_and_no_crash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = child_pids()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(NULL) as engine, engine.generate([1], LONG) as stream:
            await anext(stream)
            (pid,) = child_pids() - before
            os.kill(pid, signal.SIGTERM)
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.ABORT
            end = await engine.wait_dead()
            assert end.was_asked_to_stop
            assert str(end) == "the engine was asked to stop (exit status 0)"
            assert engine.is_dead  # nothing is answered any more
            with pytest.raises(EngineDeadError, match="asked to stop"):
                await engine.complete([1])
    assert "engine_stopped" in caplog.text
    assert "engine_dead" not in caplog.text


@pytest.mark.slow
async def test_a_model_that_is_not_there_is_a_start_error() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with pytest.raises(EngineStartError, match="exit status 2"):
            await open_and_leave(EngineConfig(model="/no/such/model"))


async def open_and_leave(config: EngineConfig) -> None:
    async with open_engine(config):
        pass


@pytest.mark.slow
async def test_in_front_of_an_engine_started_elsewhere() -> None:
    """Leaving lets it run and aborts what is open there."""
    with trio.fail_after(TEST_TIMEOUT_S), IpcDirectory() as directory:
        address = directory.address("handshake")
        command = [sys.executable, "-m", "trio_engine.engine", "--executor=null", "--headless"]
        process = await trio.lowlevel.open_process(
            [*command, "--handshake-address", address], stderr=subprocess.DEVNULL
        )
        try:
            async with connect_engine(address) as engine, engine.generate([1], LONG) as stream:
                assert (await anext(stream)).token_ids
            assert process.poll() is None
        finally:
            process.terminate()
            await process.wait()
        assert process.returncode == 0


OWNER = """
import trio
from trio_engine import EngineConfig, SamplingParams, open_engine
from tests.process.processes import child_pids

async def main():
    config = EngineConfig(executor="null", null_step_ms=50.0)
    async with open_engine(config) as engine:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        async with engine.generate([1], params) as stream:
            await anext(stream)
            print(*child_pids(), flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
async def test_the_engine_leaves_when_its_owner_is_killed_and_takes_the_sockets_along() -> None:
    parent = tempfile.mkdtemp(prefix="te-", dir="/tmp")  # short enough for sockets in it
    env = {**os.environ, "TMPDIR": parent}
    command = [sys.executable, "-c", OWNER]
    with trio.fail_after(TEST_TIMEOUT_S):
        owner = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, env=env)
        assert owner.stdout is not None
        async with owner.stdout:
            engine_pid = int(await owner.stdout.receive_some())
        owner.kill()
        await owner.wait()
        with trio.fail_after(2.0):
            await wait_ended(engine_pid)
    os.rmdir(parent)  # which fails unless it is empty
