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
    from collections.abc import Awaitable, Callable, Iterable

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
    started, delay = trio.current_time(), CpuDelay(os.getpid(), *pids)
    deadline = started + seconds
    while True:
        with trio.move_on_at(deadline):
            return await wait()
        deadline = started + seconds + delay.so_far_s()
        if deadline <= trio.current_time():
            raise trio.TooSlowError


class CpuDelay:
    """How long threads of these processes are ready to run and do not, from now on.

    Each thread by itself: one that ends takes with it what it was kept waiting before.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._before_ns = _waited_ns(pids)

    def so_far_s(self) -> float:
        """In seconds; without threads that have ended."""
        before_ns = self._before_ns
        now_ns = _waited_ns(self._pids)
        return sum(ns - before_ns.get(thread, 0) for thread, ns in now_ns.items()) / 1e9


def _waited_ns(pids: Iterable[int]) -> dict[str, int]:
    waited_ns = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it ended meanwhile
                waited_ns[path.parent.name] = int(path.read_text().split()[1])
    return waited_ns
