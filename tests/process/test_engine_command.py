"""The engine as a process: how it ends in every phase of its life, and what it leaves behind.

Times are what the design promises: 2 s from a signal or the owner's end, or the configured
limits. Starting an interpreter is not counted in. One file, because it is one table: every phase
against every way to end.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import asynccontextmanager
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.process.engine_programs import (
    BIG_ANSWERS,
    LOAD_FAILS,
    LOADS_FOR_EVER,
    STEP_FAILS,
    STEP_NEVER_RETURNS,
    EngineUnderTest,
    engine_command,
    open_engine_under_test,
    scripted_command,
    steps_wait_while,
)
from tests.process.processes import children_of
from trio_engine.engine.exit import ExitStatus
from trio_engine.errors import EngineDeadError
from trio_engine.outputs import FinishReason
from trio_engine.testing.wire_front_end import WireFrontEnd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TEST_TIMEOUT_S = 100.0
GONE_S = 2.0
"""The promise for an engine that nothing keeps busy, or whose owner is gone."""

PROMPT = [1, 2, 3]

slow = pytest.mark.slow
both_signals = pytest.mark.parametrize("number", [SIGTERM, SIGINT])
each_way = pytest.mark.parametrize("numbers", [[SIGTERM], [SIGINT], [SIGTERM, SIGTERM]])


@asynccontextmanager
async def open_started(
    command: list[str],
    *,
    owned: bool = False,
    num_clients: int = 1,
    receive_hwm: int | None = None,
) -> AsyncIterator[tuple[WireFrontEnd, EngineUnderTest]]:
    """An engine that has said READY, and its front end."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(num_clients, receive_hwm=receive_hwm) as front_end:
            address = f"--handshake-address={front_end.handshake_address}"
            async with open_engine_under_test([*command, address], owned=owned) as engine:
                await front_end.start_up()
                yield front_end, engine


@asynccontextmanager
async def open_starting(
    command: list[str], *, owned: bool = False
) -> AsyncIterator[tuple[WireFrontEnd, EngineUnderTest]]:
    """An engine that has just been spawned, and the front end that it will greet."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd() as front_end:
            address = f"--handshake-address={front_end.handshake_address}"
            async with open_engine_under_test([*command, address], owned=owned) as engine:
                yield front_end, engine


# Asked to stop


@pytest.mark.known_fault(kind="signal-at-start-up")
@each_way
async def test_just_after_it_is_ready(numbers: list[signal.Signals]) -> None:
    async with open_started(engine_command()) as (_, engine):
        assert children_of(engine.process.pid) == []
        engine.send(*numbers)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED
        assert f"stop_requested reason='{numbers[0].name}'" in engine.stderr
        assert "Traceback" not in engine.stderr


@pytest.mark.known_fault(kind="signal-at-start-up")
@slow
@both_signals
async def test_in_its_first_moments(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as there is a handler, before the engine is imported: here that takes minutes."""
    (tmp_path / "trio.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    async with open_starting(engine_command()) as (_, engine):
        await engine.wait_handlers()
        engine.send(number)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED
        assert engine.stderr == ""


@pytest.mark.known_fault(kind="signal-at-start-up")
@slow
@each_way
@pytest.mark.parametrize("after_s", [0.05, 0.1, 0.2, 0.4])
async def test_after_so_long_wherever_it_is_by_then(
    after_s: float, numbers: list[signal.Signals]
) -> None:
    """Counted from its handlers: before its first line the interpreter may swallow a SIGINT."""
    async with open_starting(engine_command()) as (_, engine):
        await engine.wait_handlers()
        await trio.sleep(after_s)
        engine.send(*numbers)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


@pytest.mark.known_fault(kind="signal-at-start-up")
@slow
@pytest.mark.parametrize("count", [1, 2])
async def test_between_its_first_moments_and_trio(count: int) -> None:
    """Noted by a plain handler, and counted when Trio's receiver is open."""
    proc = f"""
    async def run(self, *args):
        for _ in range({count}):
            os.kill(os.getpid(), signal.SIGTERM)
        await super().run(*args)
    """
    async with open_starting(scripted_command(proc=proc)) as (_, engine):
        assert await engine.wait(TEST_TIMEOUT_S) == ExitStatus.STOPPED
        assert engine.stderr.count("stop_requested reason='SIGTERM'") == count


@pytest.mark.known_fault(kind="signal-at-start-up")
@slow
@each_way
async def test_while_it_waits_for_a_front_end_that_says_nothing(
    numbers: list[signal.Signals],
) -> None:
    async with open_starting(engine_command()) as (front_end, engine):
        await front_end.receive_handshake()
        engine.send(*numbers)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


@pytest.mark.known_fault(kind="signal-at-start-up")
@slow
async def test_while_it_waits_for_a_front_end_that_is_not_there(tmp_path: Path) -> None:
    """Its HELLO must not keep it."""
    command = engine_command(f"--handshake-address=ipc://{tmp_path}/nobody")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine_under_test(command) as engine:
            await engine.wait_stderr(
                f"front_end_awaited address=ipc://{tmp_path}/nobody timeout_s="
            )
            engine.send(SIGTERM)
            assert await engine.wait(GONE_S) == ExitStatus.STOPPED


@pytest.mark.known_fault(kind="signal-at-start-up")
@each_way
async def test_while_it_loads(numbers: list[signal.Signals]) -> None:
    """A load cannot be interrupted, so the process leaves without it."""
    async with open_starting(scripted_command(executor=LOADS_FOR_EVER)) as (front_end, engine):
        await front_end.greet()
        await engine.wait_stderr("loading")
        engine.send(*numbers)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


async def test_while_it_steps() -> None:
    async with open_started(engine_command("--null-step-ms=2"), num_clients=2) as (
        front_end,
        engine,
    ):
        for client in range(2):
            await front_end.add("x", PROMPT, client=client, max_tokens=2000)
            await front_end.wait_num_tokens("x", 3, client=client)
        engine.send(SIGTERM)
        for client in range(2):
            log = await front_end.finish("x", client=client)
            assert log.finish_reason is FinishReason.ABORT
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED
        assert f"engine_ready address={front_end.handshake_address}" in engine.stderr


@pytest.mark.known_fault(kind="careless-drain")
@slow
async def test_a_drain_that_completes(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    command = scripted_command("--shutdown-timeout=20", executor=steps_wait_while(held))
    async with open_started(command) as (front_end, engine):
        await front_end.add("x", PROMPT, max_tokens=100)
        await engine.wait_stderr("stepping")
        engine.send(SIGTERM)
        await engine.wait_stderr("stop_requested")
        await front_end.add("late", PROMPT)
        assert (await front_end.finish("late")).finish_reason is FinishReason.ABORT
        held.unlink()
        log = await front_end.finish("x")
        assert (len(log.token_ids), log.finish_reason) == (100, FinishReason.LENGTH)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


@pytest.mark.known_fault(kind="careless-drain")
@slow
async def test_a_drain_that_takes_too_long() -> None:
    command = engine_command("--null-step-ms=2", "--shutdown-timeout=0.3")
    async with open_started(command) as (front_end, engine):
        await front_end.add("x", PROMPT, max_tokens=2000)
        await front_end.wait_num_tokens("x", 1)
        engine.send(SIGTERM)
        assert (await front_end.finish("x")).finish_reason is FinishReason.ABORT
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


@pytest.mark.known_fault(kind="careless-drain")
@slow
async def test_a_drain_is_cut_short_by_a_second_signal() -> None:
    command = engine_command("--null-step-ms=2", "--shutdown-timeout=60")
    async with open_started(command) as (front_end, engine):
        await front_end.add("x", PROMPT, max_tokens=2000)
        await front_end.wait_num_tokens("x", 1)
        engine.send(SIGTERM)
        await engine.wait_stderr("stop_requested")
        engine.send(SIGINT)
        assert (await front_end.finish("x")).finish_reason is FinishReason.ABORT
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


# Clean-up


async def fill_buffers(front_end: WireFrontEnd, engine: EngineUnderTest, client: int) -> None:
    """Has the engine give answers until it cannot send to a client that does not read."""
    for _ in range(40):
        await front_end.post_utility("collective_rpc", "big", client=client)
    await engine.wait_stderr("40 answers")


@pytest.mark.known_fault(kind="lost-last-words")
@slow
@pytest.mark.parametrize("ending", ["stop", "crash"])
async def test_last_words_reach_a_slow_client_and_do_not_wait_for_a_dead_one(ending: str) -> None:
    """Four clients with 20 requests each: two read, one reads slowly, one never."""
    command = scripted_command(
        "--null-step-ms=100",  # so that few more messages wait for the slow one when it ends
        "--max-num-seqs=80",
        "--num-blocks=8192",
        "--flush-timeout=2",
        executor=BIG_ANSWERS,
    )
    async with open_started(command, num_clients=4, receive_hwm=1) as (front_end, engine):
        await fill_buffers(front_end, engine, client=3)
        for _ in range(SLOW_BACKLOG):
            await front_end.post_utility("collective_rpc", "big", client=2)
        await engine.wait_stderr(f"{40 + SLOW_BACKLOG} answers")
        for index in range(20):
            for client in range(4):
                await front_end.add(f"r{index}", PROMPT, client=client, max_tokens=1500)
        await front_end.wait_num_tokens("r0", 1, client=0)
        if ending == "stop":
            engine.send(SIGTERM)
        else:
            await front_end.post_utility("collective_rpc", "crash", client=0)
        async with trio.open_nursery() as nursery:
            for client, pause_s in enumerate([0, 0, SLOW_READ_S]):
                nursery.start_soon(read_last_words, front_end, client, ending, pause_s)
        status = ExitStatus.STOPPED if ending == "stop" else ExitStatus.CRASHED
        assert await engine.wait(2.0 + GONE_S) == status
        assert engine.stderr.count("outputs_dropped") == 1
        assert "outputs_dropped client=3" in engine.stderr


SLOW_READ_S = 0.05
SLOW_BACKLOG = 8
"""Answers that wait for the slow one: more than can be on their way to it, read in 0.4 s."""


async def read_last_words(
    front_end: WireFrontEnd, client: int, ending: str, pause_s: float
) -> None:
    """Reads one message after the other, with a pause before each, until all is told."""
    logs = [front_end.logs[(client, f"r{index}")] for index in range(20)]
    try:
        while ending == "crash" or any(log.finish_reason is None for log in logs):
            await trio.sleep(pause_s)
            await front_end.next_outputs(client)
    except EngineDeadError:
        assert ending == "crash"
    else:
        assert {log.finish_reason for log in logs} == {FinishReason.ABORT}


@pytest.mark.known_fault(kind="lost-last-words")
@slow
async def test_further_signals_do_not_cut_clean_up_short() -> None:
    command = scripted_command("--flush-timeout=0.7", executor=BIG_ANSWERS)
    async with open_started(command, num_clients=2, receive_hwm=1) as (front_end, engine):
        await fill_buffers(front_end, engine, client=1)
        await front_end.call_utility("is_sleeping")
        engine.send(SIGTERM)
        await engine.wait_stderr("stop_requested")
        with trio.move_on_after(0.3):
            while True:
                engine.send(SIGTERM, SIGINT)
                await trio.sleep(0.05)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED
        assert "outputs_dropped client=1" in engine.stderr
        assert "Traceback" not in engine.stderr


LATE_SIGNAL = """
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

async def run(self, *args):
    await super().run(*args)
    sys.late = self.Late()  # goes when the interpreter has nearly ended
"""


@slow
async def test_a_signal_while_the_interpreter_ends_does_not_change_the_status() -> None:
    async with open_started(scripted_command(proc=LATE_SIGNAL)) as (_, engine):
        engine.send(SIGTERM)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


# A step that never returns


@pytest.mark.known_fault(kind="uncancellable-thread")
@slow
@pytest.mark.parametrize("shutdown_timeout_s", [0, 0.2])
async def test_a_step_that_never_returns_is_waited_for_so_long(shutdown_timeout_s: float) -> None:
    """Its clients are told before that, and it counts as stopped: it was asked to."""
    grace_s = 2.0
    command = scripted_command(
        f"--exit-grace={grace_s}",
        f"--shutdown-timeout={shutdown_timeout_s}",
        executor=STEP_NEVER_RETURNS,
    )
    async with open_started(command, num_clients=2) as (front_end, engine):
        for client in range(2):
            await front_end.add("x", PROMPT, client=client)
        await engine.wait_stderr("stepping")
        started = trio.current_time()
        engine.send(SIGTERM)
        for client in range(2):
            log = await front_end.finish("x", client=client)
            assert log.finish_reason is FinishReason.ABORT
        assert trio.current_time() - started < grace_s + shutdown_timeout_s
        await front_end.add("late", PROMPT)
        assert (await front_end.finish("late")).finish_reason is FinishReason.ABORT
        assert await engine.wait(grace_s + GONE_S) == ExitStatus.STOPPED
        assert trio.current_time() - started >= grace_s + shutdown_timeout_s
        assert "WARNING trio_engine.engine.exit: forward_thread_stuck" in engine.stderr


@slow
async def test_a_crash_beside_a_step_that_never_returns() -> None:
    """Every client hears of it, though the orderly way out is blocked."""
    proc = """
    async def _run_steps(self, work, loop):
        work.start_soon(self.crash)
        await super()._run_steps(work, loop)

    async def crash(self):
        import trio

        while "x" not in str(self._loop.core.running_request_ids):
            await trio.sleep(0.01)
        await trio.sleep(0.1)
        raise RuntimeError("a bug of ours")
    """
    command = scripted_command("--exit-grace=0.3", executor=STEP_NEVER_RETURNS, proc=proc)
    async with open_started(command, num_clients=2) as (front_end, engine):
        await front_end.add("x", PROMPT)
        for client in range(2):
            await front_end.wait_dead(client)
        assert await engine.wait(GONE_S) == ExitStatus.CRASHED
        assert "ERROR trio_engine.engine.exit: forward_thread_stuck" in engine.stderr


@slow
async def test_a_step_that_returns_while_the_process_is_about_to_leave(tmp_path: Path) -> None:
    """The orderly way is open again, and nothing is said twice."""
    held = tmp_path / "held"
    held.touch()
    command = scripted_command(
        "--exit-grace=0.2", "--flush-timeout=2", executor=BIG_ANSWERS + steps_wait_while(held)
    )
    async with open_started(command, num_clients=2, receive_hwm=1) as (front_end, engine):
        await fill_buffers(front_end, engine, client=1)  # so that leaving takes its time
        await front_end.add("x", PROMPT)
        await engine.wait_stderr("stepping")
        engine.send(SIGTERM)
        assert (await front_end.finish("x")).finish_reason is FinishReason.ABORT
        await engine.wait_stderr("forward_thread_stuck")
        held.unlink()
        assert await engine.wait(2 + GONE_S) == ExitStatus.STOPPED
        await front_end.check_silent(0)
        assert "Traceback" not in engine.stderr


@slow
async def test_a_fault_in_the_last_words_does_not_keep_a_stuck_process() -> None:
    proc = """
    def _say_last_words(self, *, failed):
        raise RuntimeError("a bug of ours")
    """
    command = scripted_command("--exit-grace=0.1", executor=STEP_NEVER_RETURNS, proc=proc)
    async with open_started(command) as (front_end, engine):
        await front_end.add("x", PROMPT)
        await engine.wait_stderr("stepping")
        engine.send(SIGTERM)
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED
        assert "last_words_failed" in engine.stderr


# The owner


@pytest.mark.known_fault(kind="orphan-engine")
@pytest.mark.parametrize("grace", [2, 60])
async def test_its_owner_goes_while_a_step_never_returns(grace: int) -> None:
    command = scripted_command(f"--exit-grace={grace}", executor=STEP_NEVER_RETURNS)
    async with open_started(command, owned=True) as (front_end, engine):
        await front_end.add("x", PROMPT)
        await engine.wait_stderr("stepping")
        engine.end_owner()
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


@slow
async def test_its_owner_goes_while_it_has_begun_to_wait_for_a_step() -> None:
    command = scripted_command("--exit-grace=60", executor=STEP_NEVER_RETURNS)
    async with open_started(command, owned=True) as (front_end, engine):
        await front_end.add("x", PROMPT)
        await engine.wait_stderr("stepping")
        engine.send(SIGTERM)
        await front_end.finish("x")
        engine.end_owner()
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


@pytest.mark.known_fault(kind="orphan-engine")
@slow
async def test_its_owner_goes_while_it_is_idle() -> None:
    async with open_started(engine_command("--shutdown-timeout=60"), owned=True) as (_, engine):
        engine.end_owner()
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED
        assert "owner is gone" in engine.stderr


@slow
async def test_its_owner_goes_while_it_drains_for_a_client_that_does_not_read() -> None:
    """Neither the drain nor the flush nor what ZeroMQ holds keeps it."""
    command = scripted_command(
        "--null-step-ms=2", "--shutdown-timeout=60", "--flush-timeout=60", executor=BIG_ANSWERS
    )
    async with open_started(command, owned=True, num_clients=2, receive_hwm=1) as (
        front_end,
        engine,
    ):
        await fill_buffers(front_end, engine, client=1)
        await front_end.add("x", PROMPT, max_tokens=2000)
        await front_end.wait_num_tokens("x", 1)
        engine.send(SIGTERM)
        await engine.wait_stderr("stop_requested")
        engine.end_owner()
        assert await engine.wait(GONE_S) == ExitStatus.STOPPED


@slow
async def test_an_owner_that_is_no_pipe() -> None:
    async with open_starting(engine_command("--owner-fd=77")) as (_, engine):
        assert await engine.wait(TEST_TIMEOUT_S) == ExitStatus.START_UP_FAILED
        assert "owner descriptor 77 is no pipe" in engine.stderr


# Failing


@pytest.mark.known_fault(kind="silent-death")
async def test_a_crash_in_a_step() -> None:
    command = scripted_command(executor=STEP_FAILS)
    async with open_started(command, num_clients=3) as (front_end, engine):
        await front_end.add("x", PROMPT, client=1)
        for client in range(3):
            await front_end.wait_dead(client)
        assert await engine.wait(GONE_S) == ExitStatus.CRASHED
        for words in ("engine_failed ready=True", "device lost", "'x'"):
            assert words in engine.stderr


@slow
async def test_a_load_that_fails_says_why() -> None:
    async with open_starting(scripted_command(executor=LOAD_FAILS)) as (front_end, engine):
        await front_end.greet()
        assert await engine.wait(GONE_S) == ExitStatus.START_UP_FAILED
        assert "start_up_failed reason='no such model: /nowhere'" in engine.stderr


@pytest.mark.known_fault(kind="bad-address")
@slow
async def test_an_address_in_init_that_cannot_be_says_why() -> None:
    async with open_starting(engine_command()) as (front_end, engine):
        front_end.addresses.outputs[0] = "ipc://" + "x" * 200
        await front_end.greet()
        assert await engine.wait(GONE_S) == ExitStatus.START_UP_FAILED
        assert "start_up_failed reason='path of 'ipc://xxx" in engine.stderr


@pytest.mark.known_fault(kind="bad-address")
@slow
async def test_no_init_in_time() -> None:
    async with open_starting(engine_command("--handshake-timeout=0.5")) as (front_end, engine):
        await front_end.receive_handshake()
        assert await engine.wait(GONE_S) == ExitStatus.START_UP_FAILED
        assert "no INIT from the front end" in engine.stderr


@slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--handshake-address is missing"),
        (["--handshake-address=pigeon"], "address must be ipc://PATH or tcp://HOST:PORT"),
        (["--handshake-address=ipc:///a", "--max-num-seqs=0"], "max_num_seqs must be 1 or more"),
        (["--handshake-address=ipc:///a", "--data-parallel-rank=70000"], "0 to 65535"),
    ],
)
async def test_options_that_cannot_be(options: list[str], words: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine_under_test(engine_command(*options)) as engine:
            assert await engine.wait(TEST_TIMEOUT_S) == ExitStatus.START_UP_FAILED
            assert words in engine.stderr


@slow
async def test_it_says_how_it_is_used() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        command = [sys.executable, "-m", "trio_engine.engine", "--help"]
        done: Any = await trio.run_process(command, capture_stdout=True)
        assert b"--handshake-address" in done.stdout
