"""``--trace``: the file is whole, however the engine process ends."""

from __future__ import annotations

import json
from signal import SIGTERM
from typing import TYPE_CHECKING

import pytest
import trio

from tests.process.engine_programs import (
    EngineUnderTest,
    engine_command,
    open_engine_under_test,
    scripted_command,
)
from trio_engine.engine.exit import ExitStatus
from trio_engine.testing.wire_front_end import WireFrontEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    Ending = Callable[[WireFrontEnd, EngineUnderTest], Awaitable[None]]

TEST_TIMEOUT_S = 100.0
END_S = 5.0
NUM_TOKENS = 20

FAILS_AFTER_SOME_STEPS = """
num_steps = 0

def collect(self):
    self.num_steps += 1
    if self.num_steps > 20:
        print("stepping", file=sys.stderr, flush=True)
        {ending}
    return super().collect()
"""


async def end_by_signal(front_end: WireFrontEnd, engine: EngineUnderTest) -> None:
    await front_end.finish("x")
    engine.send(SIGTERM)


async def end_by_owner(front_end: WireFrontEnd, engine: EngineUnderTest) -> None:
    await front_end.finish("x")
    engine.end_owner()


async def end_by_crash(front_end: WireFrontEnd, _: EngineUnderTest) -> None:
    await front_end.wait_dead()


async def end_in_a_step(_: WireFrontEnd, engine: EngineUnderTest) -> None:
    await engine.wait_stderr("stepping")
    engine.send(SIGTERM)


CRASHES = FAILS_AFTER_SOME_STEPS.format(ending='raise RuntimeError("device lost")')
HANGS = FAILS_AFTER_SOME_STEPS.format(ending="time.sleep(600)")


@pytest.mark.parametrize(
    ("executor", "end", "status"),
    [
        pytest.param("pass", end_by_signal, ExitStatus.STOPPED, id="signal"),
        pytest.param("pass", end_by_owner, ExitStatus.STOPPED, id="owner", marks=pytest.mark.slow),
        pytest.param(CRASHES, end_by_crash, ExitStatus.CRASHED, id="crash", marks=pytest.mark.slow),
        pytest.param(
            HANGS, end_in_a_step, ExitStatus.STOPPED, id="stuck step", marks=pytest.mark.slow
        ),
    ],
)
async def test_the_trace_is_whole_however_the_engine_ends(
    executor: str, end: Ending, status: ExitStatus, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    options = [f"--trace={path}", "--exit-grace=0.3"]
    async with WireFrontEnd() as front_end:
        options.append(f"--handshake-address={front_end.handshake_address}")
        command = scripted_command(*options, executor=executor)
        with trio.fail_after(TEST_TIMEOUT_S):
            async with open_engine_under_test(command, owned=True) as engine:
                await front_end.start_up()
                max_tokens = NUM_TOKENS if executor == "pass" else 1000
                await front_end.add("x", [1, 2, 3], max_tokens=max_tokens, ignore_eos=True)
                await end(front_end, engine)
                assert await engine.wait(END_S) == status
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("forward") == NUM_TOKENS
    assert {"plan", "wait", "settle", "encode", "send", "bubble"} <= set(names)


async def test_a_trace_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    path = tmp_path / "no such folder" / "trace.json"
    command = engine_command(f"--trace={path}", "--handshake-address=ipc://@nobody")
    async with open_engine_under_test(command) as engine:
        assert await engine.wait(TEST_TIMEOUT_S) == ExitStatus.START_UP_FAILED
        assert f"trace cannot be written to '{path}'" in engine.stderr
