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
    return set(children_of(os.getpid()))


def children_of(pid: int) -> list[int]:
    """Processes that another process has started and not reaped."""
    return [int(child) for text in _of_threads(pid, "children") for child in text.split()]


def thread_names(pid: int) -> list[str]:
    """What the system calls the threads of a process."""
    return _of_threads(pid, "comm")


def _of_threads(pid: int, name: str) -> list[str]:
    while True:
        paths = Path(f"/proc/{pid}/task").glob(f"*/{name}")
        # A thread that ends meanwhile leaves its children to another one, read already perhaps.
        with suppress(FileNotFoundError, ProcessLookupError):
            return [path.read_text() for path in paths]


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
