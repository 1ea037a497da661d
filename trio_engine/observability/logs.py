"""Log lines of an engine process: one format, and progress that a terminal shows in place.

Pure. A line is an event's name, then ``key=value`` pairs, the request id first.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import IO

PROGRESS_EVENT = "load_progress"
_PROGRESS_LINE = re.compile(rf"{PROGRESS_EVENT} done_bytes=(\d+) total_bytes=(\d+)")
_BAR_WIDTH = 30

_START_UP_FAILURE = re.compile(r"start_up_failed reason='(.*)'$", re.MULTILINE)

logger = logging.getLogger(__name__)


class LoadProgressLog:
    """Reports how much of the weights is loaded, as log lines that ``parse_progress`` reads.

    One line for each ``STEP`` of the whole, not one for each of a model's hundreds of tensors.
    """

    STEP = 0.05

    def __init__(self) -> None:
        self._next_share = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        share = done_bytes / total_bytes if total_bytes else 1.0
        if share < min(self._next_share, 1.0):
            return
        self._next_share = share + self.STEP
        logger.info("%s done_bytes=%d total_bytes=%d", PROGRESS_EVENT, done_bytes, total_bytes)


def log_start_up_failure(error: Exception) -> None:
    """Says why an engine did not start, as a log line that ``parse_start_up_failure`` reads."""
    logger.error("start_up_failed reason='%s'", error)


def parse_start_up_failure(text: str) -> str | None:
    """The reason in the last lines of an engine process; None if it gave none."""
    found = _START_UP_FAILURE.findall(text)
    return found[-1] if found else None


def parse_progress(line: str) -> tuple[int, int] | None:
    """Done and total bytes of a progress line; None for any other line."""
    found = _PROGRESS_LINE.search(line)
    return None if found is None else (int(found[1]), int(found[2]))


def render_progress(done_bytes: int, total_bytes: int) -> str:
    """One line for a terminal, without an end."""
    share = done_bytes / total_bytes if total_bytes else 1.0
    filled = round(share * _BAR_WIDTH)
    bar = "#" * filled + "." * (_BAR_WIDTH - filled)
    return f"loading weights [{bar}] {share:4.0%} of {total_bytes / 1e6:.0f} MB"


class TerminalHandler(logging.StreamHandler[IO[str]]):
    """Writes records as lines, but progress over and over in one line if on a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            progress = parse_progress(record.getMessage())
            if progress is not None and self.stream.isatty():
                self._show(*progress)
                return
        except Exception:  # as in every handler: what is logged must not fail because of it
            self.handleError(record)
            return
        super().emit(record)

    def _show(self, done_bytes: int, total_bytes: int) -> None:
        # Back to the start of the line, and clear it once everything is there.
        text = "" if done_bytes >= total_bytes else render_progress(done_bytes, total_bytes)
        self.stream.write(f"\r\x1b[K{text}")
        self.flush()


def configure_logging(level: int = logging.INFO) -> None:
    """Sends this process's log to standard error. For commands, not for a library's user."""
    handler = TerminalHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=level, handlers=[handler])
