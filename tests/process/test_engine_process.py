"""A child's output is heard to the end, and its end has words."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from trio_engine.client.process import (
    MAX_LINE_BYTES,
    STDERR_TAIL_LINES,
    EngineProcess,
    open_engine_process,
)
from trio_engine.client.service_tasks import open_service_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEST_TIMEOUT_S = 100.0


@asynccontextmanager
async def open_program(
    program: str, *, env: dict[str, str] | None = None
) -> AsyncIterator[EngineProcess]:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_service_tasks() as tasks,
            open_engine_process(
                [sys.executable, "-c", program], env=env, terminate_timeout_s=5.0, tasks=tasks
            ) as process,
        ):
            yield process


async def test_a_last_line_without_an_end_is_heard() -> None:
    async with open_program("import sys; sys.stdout.write('one\\ntwo')") as process:
        await process.wait()
        assert process.stderr_tail == "one\ntwo"
        assert process.describe_exit() == "exit status 0"


async def test_one_that_runs_has_no_exit_status() -> None:
    async with open_program("import time; time.sleep(600)") as process:
        assert process.describe_exit() == "still running"
        assert process.exit_status is None


async def test_only_the_last_lines_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trio_engine.engine")
    async with open_program("for i in range(1000): print(i)") as process:
        await process.wait()
        kept = process.stderr_tail.split("\n")
    assert kept == [str(i) for i in range(1000 - STDERR_TAIL_LINES, 1000)]
    assert [record.getMessage() for record in caplog.records] == [str(i) for i in range(1000)]


async def test_of_progress_lines_in_a_row_the_last_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = ["one", *(f"load_progress done_bytes={i} total_bytes=9" for i in range(10)), "two"]
    caplog.set_level(logging.INFO, "trio_engine.engine")
    async with open_program(f"print(*{lines}, sep='\\n')") as process:
        await process.wait()
        assert process.stderr_tail.split("\n") == ["one", lines[-2], "two"]
    assert [record.getMessage() for record in caplog.records] == lines


async def test_a_line_without_end_is_cut() -> None:
    program = f"import sys; sys.stdout.write('x' * {3 * MAX_LINE_BYTES})"
    async with open_program(program) as process:
        await process.wait()
        lines = process.stderr_tail.split("\n")
    assert "".join(lines) == "x" * (3 * MAX_LINE_BYTES)
    assert len(lines) >= 2


async def test_bytes_that_are_no_text_are_survived() -> None:
    async with open_program("import os; os.write(1, b'\\xff\\n')") as process:
        await process.wait()
        assert process.stderr_tail == "\ufffd"


@pytest.mark.parametrize(
    ("number", "words"), [("SIGKILL", "killed by SIGKILL"), ("SIGRTMIN + 1", "killed by signal ")]
)
async def test_a_signal_is_named(number: str, words: str) -> None:
    program = f"import os, signal; os.kill(os.getpid(), signal.{number})"
    async with open_program(program) as process:
        await process.wait()
        assert process.describe_exit().startswith(words)


async def test_its_environment_is_what_was_given() -> None:
    async with open_program("import os; print(os.environ)", env={"ONLY": "this"}) as process:
        await process.wait()
        assert "'ONLY': 'this'" in process.stderr_tail
        assert "HOME" not in process.stderr_tail


@pytest.mark.slow
async def test_a_grandchild_that_holds_the_output_open_does_not_hold_up_the_end() -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    async with open_program(program) as process:
        await process.wait()
        os.kill(int(process.stderr_tail), signal.SIGKILL)  # which still runs
