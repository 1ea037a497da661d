"""A trace of an engine's newest steps, for viewers of Chrome's format (Perfetto, chrome://tracing).

Pure. Spans are kept in memory of a fixed size and written once, at the end: writing them as they
come would make the loop wait for a disk.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from trio_engine.core.step_phases import DEVICE_TRACK, FIRST_WRITER_TRACK, LOOP_TRACK
from trio_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO

    from trio_engine.core.step_phases import Span, StepPhases

logger = logging.getLogger(__name__)

MAX_SPANS = 1 << 17
"""Half a minute of steps of 2 ms, which have eight spans or so: 25 MB of memory, and a file of
15 MB, which viewers still open."""


class Trace:
    """Keeps the newest spans of one engine and writes them to a file.

    Args:
        path: of the file, which is emptied now, so that a bad one is noticed before the work. With
            None nothing is kept or written.
        max_spans: kept.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | None, *, max_spans: int = MAX_SPANS) -> None:
        self._path = path
        # Two threads append; each time in one step of the interpreter.
        self._spans: deque[Span] = deque(maxlen=max_spans)
        if path is None:
            return
        try:
            if Path(path).is_fifo():  # opening it would wait for a reader
                raise OSError("it is a pipe")
            Path(path).write_text("")
        except (OSError, ValueError) as error:
            raise ConfigError(f"trace cannot be written to {path!r}: {error}") from error

    def attach(self, phases: StepPhases) -> None:
        """Has a loop's spans recorded from now on."""
        if self._path is not None:
            phases.trace_to(self._spans.append)

    def write(self) -> None:
        """Writes what is there. A failure is logged: the engine has more important things to do."""
        if self._path is None:
            return
        try:
            with Path(self._path).open("w") as file:
                self._write_to(file)
        except OSError as error:
            logger.error("trace_failed path=%s reason='%s'", self._path, error)
            return
        logger.info("trace_written path=%s num_spans=%d", self._path, len(self._spans))

    def _write_to(self, file: IO[str]) -> None:
        spans = list(self._spans)
        start_ns = min((span[2] for span in spans), default=0)
        tracks = sorted({span[0] for span in spans})
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join([*_names_of(tracks), *_events(spans, start_ns)]))
        file.write("\n]}\n")


def _events(spans: Iterable[Span], start_ns: int) -> Iterator[str]:
    pid = os.getpid()
    for track, name, begin_ns, end_ns, num_tokens in spans:
        args = f',"args":{{"tokens":{num_tokens}}}' if num_tokens else ""
        yield (
            f'{{"ph":"X","pid":{pid},"tid":{track},"name":"{name}",'
            f'"ts":{(begin_ns - start_ns) / 1000},"dur":{(end_ns - begin_ns) / 1000}{args}}}'
        )


def _names_of(tracks: Iterable[int]) -> Iterator[str]:
    """Events that name the process and its tracks."""
    pid = os.getpid()
    yield f'{{"ph":"M","pid":{pid},"name":"process_name","args":{{"name":"trio_engine"}}}}'
    known = {LOOP_TRACK: "step loop", DEVICE_TRACK: "device"}
    for track in tracks:
        name = known.get(track, f"writer of client {track - FIRST_WRITER_TRACK}")
        yield (
            f'{{"ph":"M","pid":{pid},"tid":{track},"name":"thread_name",'
            f'"args":{{"name":"{name}"}}}}'
        )
