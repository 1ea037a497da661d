"""An engine's log lines, and the progress that a terminal shows in place."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from trio_engine.observability.logs import (
    LoadProgressLog,
    TerminalHandler,
    log_start_up_failure,
    parse_progress,
    parse_start_up_failure,
    render_progress,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGGER = "trio_engine.observability.logs"


class Terminal(io.StringIO):
    """A stream that says what it is told to."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class BrokenTerminal(Terminal):
    """A terminal that was hung up."""

    def write(self, text: str) -> int:
        raise OSError("hung up")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The progress's logger with nothing but what a test adds."""
    made = logging.getLogger(LOGGER)
    old = made.level, made.propagate, made.handlers
    made.propagate, made.handlers = False, []
    made.setLevel(logging.INFO)
    yield made
    made.level, made.propagate, made.handlers = old


def test_progress_is_a_line_that_can_be_read_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    LoadProgressLog()(5, 20)
    (record,) = caplog.records
    assert record.getMessage() == "load_progress done_bytes=5 total_bytes=20"
    assert parse_progress(f"12:00:00 INFO x: {record.getMessage()}") == (5, 20)


def test_many_small_steps_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    progress = LoadProgressLog()
    for done in range(1001):
        progress(done, 1000)
    found = [parse_progress(record.getMessage()) for record in caplog.records]
    assert found[0] == (0, 1000)
    assert found[-1] == (1000, 1000)
    assert 15 < len(found) <= 1 / LoadProgressLog.STEP + 1


def test_nothing_to_load_is_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    LoadProgressLog()(0, 0)
    assert "done_bytes=0 total_bytes=0" in caplog.text


@pytest.mark.parametrize("line", ["", "load_progress", "load_progress done_bytes=x total_bytes=1"])
def test_other_lines_are_no_progress(line: str) -> None:
    assert parse_progress(line) is None


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [
        (0, 8_000_000, "[..............................]   0% of 8 MB"),
        (4_000_000, 8_000_000, "[###############...............]  50% of 8 MB"),
        (8_000_000, 8_000_000, "[##############################] 100% of 8 MB"),
        (0, 0, "[##############################] 100% of 0 MB"),
    ],
)
def test_progress_as_one_line(done: int, total: int, shown: str) -> None:
    assert render_progress(done, total) == f"loading weights {shown}"


def test_a_terminal_shows_progress_in_place(logger: logging.Logger) -> None:
    stream = Terminal(is_terminal=True)
    logger.addHandler(TerminalHandler(stream))
    progress = LoadProgressLog()
    progress(1, 2)
    progress(2, 2)
    logger.info("ready port=%d", 5)
    # The last stands on a line that was cleared.
    assert stream.getvalue() == f"\r\x1b[K{render_progress(1, 2)}\r\x1b[Kready port=5\n"


def test_a_file_gets_progress_as_lines(logger: logging.Logger) -> None:
    stream = Terminal(is_terminal=False)
    logger.addHandler(TerminalHandler(stream))
    LoadProgressLog()(1, 2)
    assert stream.getvalue() == "load_progress done_bytes=1 total_bytes=2\n"


def test_a_terminal_that_is_gone_does_not_end_the_load(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.addHandler(TerminalHandler(BrokenTerminal(is_terminal=True)))
    LoadProgressLog()(1, 2)
    assert "hung up" in capsys.readouterr().err  # as logging reports its own errors


def test_an_engines_log_goes_to_standard_error() -> None:
    """In a process of its own: it sets up the root logger."""
    program = (
        "import logging; from trio_engine.observability.logs import configure_logging;"
        " configure_logging(); logging.getLogger('x').info('event key=%d', 1);"
        " logging.getLogger('x').debug('quiet')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == ""
    _, words = done.stderr.rstrip("\n").split(" ", 1)
    assert words == "INFO x: event key=1"


def test_the_reason_of_a_failed_start_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        log_start_up_failure(ValueError("it's 'odd'"))
    text = f"one\n12:00:00 ERROR x: {caplog.messages[0]}\ntwo"
    assert parse_start_up_failure(text) == "it's 'odd'"
    assert parse_start_up_failure("nothing of the kind") is None
