"""Time limits on a machine that others use as well.

A promise of seconds is about an engine that gets a CPU when it wants one. Time in which other
processes kept it, or the test, from running does not count; on an idle machine that is none.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


async def wait_within(seconds: float, wait: Callable[[], Awaitable[T]], *pids: int) -> T:
    """What ``wait`` returns, which must come within the time.

    Args:
        seconds: in which all processes could run.
        wait: called again where there is more time, so its cancellation must lose nothing.
        pids: processes that it waits for, beside this one.

    Raises:
        trio.TooSlowError: it did not come.
    """
    watched = (os.getpid(), *pids)
    started, delay_s = trio.current_time(), cpu_delay_s(*watched)
    deadline = started + seconds
    while True:
        with trio.move_on_at(deadline):
            return await wait()
        deadline = started + seconds + cpu_delay_s(*watched) - delay_s
        if deadline <= trio.current_time():
            raise trio.TooSlowError


def cpu_delay_s(*pids: int) -> float:
    """How long threads of these processes were ready to run and did not, so far."""
    total_ns = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it ended meanwhile
                _, waited_ns, _ = path.read_text().split()
                total_ns += int(waited_ns)
    return total_ns / 1e9
