"""The programs that the documentation shows, run as a reader would run them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tests.process.processes import children_of, wait_ended
from trio_engine.transport.ipc import IpcDirectory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TEST_TIMEOUT_S = 200.0


async def run_example(name: str, *arguments: str) -> str:
    """What an example prints; it must end well and say nothing on standard error."""
    with trio.fail_after(TEST_TIMEOUT_S):
        done = await trio.run_process(
            [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
            capture_stdout=True,
            capture_stderr=True,
        )
    assert done.stderr == b""
    return str(done.stdout.decode())


@pytest.mark.slow
async def test_stream_prints_the_answer_of_the_built_in_model() -> None:
    assert await run_example("stream.py") == "The capital of France is Paris.\n"


@pytest.mark.slow
async def test_structured_prints_what_follows_the_schema_and_one_of_the_choices() -> None:
    assert await run_example("structured.py") == (
        "{'city': 'Paris', 'country': 'FRANCE', 'is_capital': True}\nblue stop\n"
    )


async def test_several_requests_are_answered_side_by_side() -> None:
    lines = (await run_example("several.py")).splitlines()
    assert sorted(lines) == [
        "0: [1000, 1001, 1002, 1003] length",
        "1: [1001, 1002, 1003, 1004] length",
        "2: [1002, 1003, 1004, 1005] length",
    ]


@pytest.mark.slow
async def test_abort_ends_requests_in_three_ways() -> None:
    assert await run_example("abort.py") == (
        "left: 0 requests are open\ntoo late: True\naborted: abort\n"
    )


@pytest.mark.slow
async def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    assert await run_example("drain.py") == (
        "new request: abort\nrunning request: length after 20 tokens\n"
    )


@pytest.mark.slow
async def test_connect_is_in_front_of_an_engine_started_elsewhere() -> None:
    command = [sys.executable, "-m", "trio_engine", "engine", "--headless", "--executor", "null"]
    with IpcDirectory() as directory:
        address = directory.address("handshake")
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    [*command, "--handshake-address", address],
                    stderr=subprocess.DEVNULL,
                )
            )
            output = await run_example("connect.py", address)
            process.terminate()
    assert output == f"{list(range(1006, 1014))}\n"


async def test_connect_without_an_address_says_how_to_use_it() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        done = await trio.run_process(
            [sys.executable, str(EXAMPLES / "connect.py")], capture_stderr=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"usage: connect.py tcp://HOST:PORT\n")


async def test_inproc_needs_no_second_process() -> None:
    assert await run_example("inproc.py") == (
        "[1006, 1007, 1008, 1009] length\n4 steps, 0 requests left\n"
    )


@pytest.mark.slow
async def test_own_machine_tries_a_rule_of_its_own() -> None:
    assert await run_example("own_machine.py") == "all promises were kept\n"


async def test_fake_engine_lets_a_minute_pass_in_a_moment() -> None:
    assert await run_example("fake_engine.py") == (
        "It rains.\ntook 2 s\n(too slow)\nopen requests: 0\n"
        "asked: user: Summarize: the weather\n(try again later)\n"
    )


@pytest.mark.slow
async def test_measure_counts_tokens() -> None:
    assert "tokens/s in" in await run_example("measure.py", "2", "8", "0")


@pytest.mark.slow
async def test_supervise_starts_another_engine_when_one_dies() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        process = await trio.lowlevel.open_process(
            [sys.executable, "-W", "error", str(EXAMPLES / "supervise.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the log of the death
        )
        assert process.stdout is not None
        lines = lines_of(process.stdout)
        await wait_line(lines, "served 20 tokens")
        (engine,) = children_of(process.pid)
        os.kill(engine, signal.SIGKILL)
        await wait_line(lines, "engine died with status -9, starting another")
        await wait_line(lines, "served 20 tokens")
        (engine,) = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        await process.wait()
        await wait_ended(engine)
        await lines.aclose()
        assert process.returncode == 0
        await process.stdout.aclose()


async def lines_of(stream: trio.abc.ReceiveStream) -> AsyncGenerator[str]:
    pending = b""
    async for chunk in stream:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line.decode()


async def wait_line(lines: AsyncIterator[str], wanted: str) -> None:
    async for line in lines:
        if line == wanted:
            return
    raise AssertionError(f"the program ended without the line {wanted!r}")
