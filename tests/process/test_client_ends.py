"""What a client hears when its engine's process ends, in whatever way and at whatever moment."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import trio

from tests.fair_time import CpuDelay, wait_within
from tests.process import stand_ins
from tests.process.engine_programs import LOADS_FOR_EVER, scripted_command
from tests.process.processes import child_pids
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import EngineDeadError, EngineStartError
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.client.base import EngineClient
    from trio_engine.client.stream import RequestStream

TEST_TIMEOUT_S = 100.0
TOLD_S = 2.0
"""The promise: so long after an engine's end everybody who waits for it has been told."""

NOTICED_S = 1.0
"""The promise while it starts: so long after its process has ended its owner has been told."""

CONFIG = EngineConfig(executor="null", null_step_ms=2.0, num_blocks=512, max_model_len=2048)
ENDLESS = SamplingParams(
    output_kind=RequestOutputKind.DELTA, max_tokens=2000, ignore_eos=True, temperature=0.0
)


# Later: every waiter of every kind

# Once three requests run, after 50 steps, so that all who are to wait do.
FAILS_LATER = """
num_steps = 0

def collect(self):
    result = super().collect()
    self.num_steps += len(result.token_ids) == 3
    if self.num_steps == 50:
        raise RuntimeError("device lost")
    return result
"""

GOES_DEAF = """
async def _run_steps(self, work, loop):
    work.start_soon(self.go_deaf)
    await super()._run_steps(work, loop)

async def go_deaf(self):
    import trio

    while len(self._loop.core.running_request_ids) < 3:
        await trio.sleep(0.01)
    await trio.sleep(0.2)
    for socket in list(self._context._sockets):
        if socket.statistics().tasks_waiting_receive:
            socket.close()
"""

DEATHS = {
    "killed": scripted_command(),
    "a step fails": scripted_command(executor=FAILS_LATER),
    "its input task fails": scripted_command(proc=GOES_DEAF),
}


async def expect_dead_stream(engine: EngineClient, started: trio.Event) -> None:
    async with engine.generate([1], ENDLESS) as stream:
        await anext(stream)
        started.set()
        with pytest.raises(EngineDeadError):
            await read_all(stream)


async def read_all(stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def expect_dead_call(engine: EngineClient) -> None:
    with pytest.raises(EngineDeadError):
        await engine.call_utility("pause_scheduler", "wait")  # pends as long as anything runs


async def expect_dead_request(engine: EngineClient) -> None:
    with pytest.raises(EngineDeadError):
        await engine.complete([2], ENDLESS)


@pytest.mark.slow
@pytest.mark.known_fault(kind="silent-death")
@pytest.mark.parametrize("command", DEATHS.values(), ids=DEATHS)
async def test_every_waiter_of_every_kind_is_told(command: list[str]) -> None:
    """Three streams, a call, a request that waits, one that was not sent yet, a supervisor."""
    before = child_pids()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(CONFIG, command=command) as engine, trio.open_nursery() as nursery:
            (pid,) = child_pids() - before
            streams = [trio.Event() for _ in range(3)]
            for started in streams:
                nursery.start_soon(expect_dead_stream, engine, started)
            for started in streams:
                await started.wait()
            nursery.start_soon(expect_dead_call, engine)
            nursery.start_soon(expect_dead_request, engine)  # queues behind the pause
            if command is DEATHS["killed"]:
                await engine.call_utility("is_sleeping")
                os.kill(pid, signal.SIGKILL)
                nursery.start_soon(expect_dead_request, engine)  # was not sent
                await wait_within(TOLD_S, engine.wait_dead)
            else:
                await engine.wait_dead()
            nursery.start_soon(expect_dead_request, engine)
            nursery.start_soon(expect_dead_call, engine)
            await wait_within(TOLD_S, lambda: wait_all_told(nursery))
        assert engine.is_dead


async def wait_all_told(waiters: trio.Nursery) -> None:
    while waiters.child_tasks:  # noqa: ASYNC110  # their ends have no event
        await trio.sleep(0.005)


# While it starts


async def open_and_leave(command: list[str]) -> None:
    async with open_engine(CONFIG, command=command):
        pass


async def start(
    command: list[str], caplog: pytest.LogCaptureFixture, *, last_words: str
) -> tuple[EngineStartError, float]:
    """The error of an engine that does not start, and how long after its last words that came.

    Without the time in which others had the CPUs.
    """
    caplog.set_level(logging.INFO, "trio_engine.engine")
    delay = CpuDelay(os.getpid())
    with trio.fail_after(TEST_TIMEOUT_S), pytest.raises(EngineStartError) as caught:
        await open_and_leave(command)
    told = time.time()
    (said,) = [r.created for r in caplog.records if last_words in r.getMessage()]
    return caught.value, told - said - delay.so_far_s()


@pytest.mark.known_fault(kind="bad-address")
@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize(
    "make_command",
    [stand_ins.exits, pytest.param(stand_ins.exits_after_hello, marks=pytest.mark.slow)],
)
async def test_the_end_of_an_engine_that_starts_is_noticed_at_once(
    make_command: Callable[[int], list[str]], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By its exit status, whatever that is, and not by a time limit."""
    error, delay_s = await start(make_command(status), caplog, last_words="no such model")
    assert error.exit_status == status
    assert delay_s < NOTICED_S


@pytest.mark.slow
@pytest.mark.known_fault(kind="bad-address")
@pytest.mark.parametrize("status", [0, 1])
async def test_the_end_of_an_engine_that_has_just_started_is_noticed(status: int) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(CONFIG, command=stand_ins.exits_after_ready(status)) as engine:
            with pytest.raises(EngineDeadError):
                await engine.complete([1])
            assert (await engine.wait_dead()).exit_status == status
            with pytest.raises(EngineDeadError):
                await engine.complete([1])


@pytest.mark.slow
@pytest.mark.known_fault(kind="signal-at-start-up")
async def test_who_waits_for_an_engine_that_is_stopped_while_it_loads_is_told_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = child_pids()

    async def stop_it() -> None:
        while "loading" not in caplog.text:  # noqa: ASYNC110  # a log, not an event
            await trio.sleep(0.01)
        (pid,) = child_pids() - before
        os.kill(pid, signal.SIGTERM)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_it)
        command = scripted_command(executor=LOADS_FOR_EVER)
        error, delay_s = await start(command, caplog, last_words="stop_requested")
    assert error.exit_status == 0
    assert delay_s < TOLD_S


@pytest.mark.slow
@pytest.mark.known_fault(kind="bad-address")
async def test_processes_started_at_once_do_not_get_in_each_others_way() -> None:
    async def use() -> None:
        async with open_engine(CONFIG) as engine:
            output = await engine.complete([1], SamplingParams(max_tokens=2))
            assert len(output.token_ids) == 2

    with trio.fail_after(TEST_TIMEOUT_S):
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(use)
