"""How far a benchmark has come, as one line that is written over and over on a terminal.

Pure.
"""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from trio_engine.bench.figures import Recorder
    from trio_engine.bench.load import Progress

INTERVAL_S = 0.1
"""Between two lines: as often as anybody reads it, and too seldom to cost anything."""


class CounterLine:
    """Writes progress to a stream if that is a terminal, else nothing.

    Args:
        stream: standard error, so that tables can be piped.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_shown = stream.isatty()
        self._next_s = 0.0

    def of(self, name: str, num_requests: int) -> Progress:
        """What a load tells about itself under ``name``."""
        if not self._is_shown:
            return lambda _: None
        start_s = time.monotonic()

        def show(recorder: Recorder) -> None:
            now_s = time.monotonic()
            if now_s < self._next_s:
                return
            self._next_s = now_s + INTERVAL_S
            speed = recorder.num_tokens / max(1e-3, now_s - start_s)
            self.note(
                f"{name}: {recorder.num_ended}/{num_requests} requests, {speed:,.0f} tokens/s"
            )

        return show

    def note(self, text: str) -> None:
        """Puts a line in the place of the one before."""
        if self._is_shown:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def clear(self) -> None:
        """Leaves nothing behind."""
        self.note("")
