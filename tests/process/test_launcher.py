"""Engines as processes: spawned, heard, and ended on every path. The leak guard sees the rest."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import trio

from tests.fair_time import wait_within
from tests.process import stand_ins
from tests.process.processes import is_running, wait_ended
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import EngineDeadError, EngineStartError
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

NULL = EngineConfig(executor="null")
DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=100_000)
TEST_TIMEOUT_S = 100.0


async def open_and_leave(command: list[str]) -> None:
    async with open_engine(NULL, command=command):
        pass


@pytest.mark.known_fault(kind="bad-address")
@pytest.mark.parametrize("status", [0, 1])
async def test_ends_before_hello(status: int) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with pytest.raises(EngineStartError, match=f"exit status {status}") as caught:
            await open_and_leave(stand_ins.exits(status))
        assert caught.value.exit_status == status
        assert caught.value.stderr_tail == "no such model"
        assert "no such model" in caught.value.__notes__[0]


async def test_no_such_command() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with pytest.raises(EngineStartError, match="/no/such/command"):
            await open_and_leave(["/no/such/command"])


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.3])
async def test_cancelled_while_it_starts(delay_s: float) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with trio.move_on_after(delay_s) as scope:
            await open_and_leave(stand_ins.NEVER_SAYS_HELLO)
        assert scope.cancelled_caught


@pytest.mark.known_fault(kind="bad-address")
async def test_a_long_tmpdir_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with trio.fail_after(TEST_TIMEOUT_S), pytest.raises(EngineStartError, match="exit status 0"):
        await open_and_leave(stand_ins.exits(0))


async def test_a_life_in_good_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_engine.engine")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(NULL, command=stand_ins.STREAMS) as engine:
            async with engine.generate([1], DELTA) as stream:
                async for delta in stream:
                    assert set(delta.token_ids) == {7}
                    break
            pid = await engine.call_utility("getpid")
            assert os.getsid(pid) == pid  # Ctrl-C at our terminal does not reach it
            assert not engine.is_dead
        assert not is_running(pid)
    lines = [record.getMessage() for record in caplog.records if record.name.endswith(".engine")]
    assert lines[:2] == ["a line on stdout", "a line on stderr"]
    assert lines[-1] == "asked to stop"


@pytest.mark.slow
async def test_the_last_word_carries_the_exit_status_and_the_traceback() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(NULL, command=stand_ins.DIES_WITH_A_WORD) as engine:
            with pytest.raises(EngineDeadError, match="exit status 1") as caught:
                await engine.complete([1])
            assert caught.value.exit_status == 1
            assert caught.value.stderr_tail == "Traceback: the step failed"
            assert "the step failed" in caught.value.__notes__[0]


@pytest.mark.slow
async def test_one_that_ignores_sigterm_is_killed_with_its_helpers() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(
            NULL, command=stand_ins.IGNORES_SIGTERM, terminate_timeout_s=0.1
        ) as engine:
            helper_pid = await engine.call_utility("helper")
            assert is_running(helper_pid)
        await wait_ended(helper_pid)


@pytest.mark.slow
def test_a_second_ctrl_c_kills_it_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first one ends the body, the second the wait for the process."""
    caplog.set_level(logging.INFO, "trio_engine.engine")

    @trio.lowlevel.enable_ki_protection  # so that it is the main task that is interrupted
    async def interrupt_again() -> None:
        while "not now" not in caplog.text:  # noqa: ASYNC110  # a log, not an event
            await trio.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        async with (
            trio.open_nursery() as nursery,
            open_engine(
                NULL, command=stand_ins.IGNORES_SIGTERM, terminate_timeout_s=TEST_TIMEOUT_S
            ),
        ):
            nursery.start_soon(interrupt_again)
            signal.raise_signal(signal.SIGINT)

    started = time.monotonic()
    with pytest.RaisesGroup(KeyboardInterrupt):
        trio.run(main)
    assert time.monotonic() - started < TEST_TIMEOUT_S / 2


@pytest.mark.slow
async def test_the_bodys_error_and_cancellation_end_it_too() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with pytest.raises(ZeroDivisionError):
            await divide_by_zero_in_body()
        with trio.CancelScope() as scope:
            async with open_engine(NULL, command=stand_ins.STREAMS):
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught


async def divide_by_zero_in_body() -> None:
    async with open_engine(NULL, command=stand_ins.STREAMS):
        _ = 1 / 0


OWNER = """
import subprocess, sys, trio
from tests.process import stand_ins
from tests.process.processes import is_running, wait_ended
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig

async def main():
    command = stand_ins.LEAVES_WITH_ITS_OWNER
    async with open_engine(EngineConfig(executor="null"), command=command) as engine:
        # Must not inherit the pipe: it outlives us.
        sibling = subprocess.Popen(["sleep", "600"], close_fds=False)
        engine_pid = await engine.call_utility("getpid")
        print(f"{engine_pid} {sibling.pid}", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
async def test_it_leaves_when_its_owner_is_killed(tmp_path: Path) -> None:
    # The stand-in does not remove its owner's socket directory.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OWNER]
    with trio.fail_after(TEST_TIMEOUT_S):
        owner = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, env=env)
        assert owner.stdout is not None
        async with owner.stdout:
            engine_pid, sibling_pid = map(int, (await owner.stdout.receive_some()).split())
        try:
            owner.kill()
            await owner.wait()
            await wait_within(2.0, lambda: wait_ended(engine_pid), engine_pid)
        finally:
            os.kill(sibling_pid, signal.SIGKILL)
