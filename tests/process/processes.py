"""Looking at processes from outside."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import trio


def is_running(pid: int) -> bool:
    """Whether there is such a process, one that ended and was not reaped included."""
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def child_pids() -> set[int]:
    """Children of this process."""
    return {
        int(pid)
        for thread in Path("/proc/self/task").iterdir()
        for pid in (thread / "children").read_text().split()
    }


def children_of(pid: int) -> list[int]:
    """Processes that another process has started and not reaped."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in paths for child in path.read_text().split()]


def thread_names(pid: int) -> list[str]:
    """What the system calls the threads of a process."""
    return [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")]


async def wait_ended(pid: int) -> None:
    """Waits for the end of any process, a child of ours or not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
