"""Finds what a piece of code left behind: processes, threads, ZeroMQ contexts, sockets, files.

Public kit, standard library only. Reads ``/proc``; where there is none it sees Python's threads
and the files.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEFAULT_GRACE_S = 2.0
"""How long a leak may take to go away. Threads end a moment after what waits for them, and
ZeroMQ's close their descriptors after that."""

POLL_INTERVAL_S = 0.01

TRIO_IDLE_THREAD = "Trio thread "
"""Start of the name of a thread in Trio's worker cache, which keeps it for 10 idle seconds. While
it works it is called after its function, so a busy one is a leak."""

ZMQ_COLLECTOR = ("zmq.utils.garbage", "GarbageCollectorThread")
"""pyzmq's thread that releases memory of uncopied frames. It starts with the first such frame,
serves the whole process, and owns a ZeroMQ context of its own."""

ZMQ_REAPER = "ZMQbg/Reaper"
"""Operating system's name of a thread that every context has from its first socket on."""

OWN_FILES = "trio-engine-*"
"""Socket directories and shared memory of this package."""


class Snapshot(NamedTuple):
    """What this process holds at one moment, each thing by a name to report it by.

    Children are process ids: what else is known of one, as its state, changes while it lives.
    """

    processes: frozenset[int]
    threads: frozenset[str]
    zmq_contexts: frozenset[str]
    descriptors: frozenset[str]
    files: frozenset[str]
    has_zmq_collector: bool


def take_snapshot() -> Snapshot:
    """What this process holds now."""
    threads = threading.enumerate()
    collectors = [thread for thread in threads if _is_zmq_collector(thread)]
    return Snapshot(
        processes=frozenset(map(int, _child_pids())),
        threads=frozenset(
            f"thread {thread.name!r} ({thread.ident})"
            for thread in threads
            if thread not in collectors and not thread.name.startswith(TRIO_IDLE_THREAD)
        ),
        zmq_contexts=frozenset(_zmq_contexts()),
        descriptors=frozenset(_pipes_and_sockets()),
        files=frozenset(_own_files()),
        has_zmq_collector=bool(collectors),
    )


def find_leaks(before: Snapshot) -> list[str]:
    """What is there now and was not before, in words; empty if nothing is."""
    now = take_snapshot()
    contexts = sorted(now.zmq_contexts - before.zmq_contexts)
    if now.has_zmq_collector and not before.has_zmq_collector:
        contexts = contexts[1:]  # the collector's own, which stays with it
    return [
        *_describe_children(now.processes - before.processes),
        *sorted(now.threads - before.threads),
        *contexts,
        *sorted(now.descriptors - before.descriptors),
        *sorted(now.files - before.files),
    ]


def wait_leaks_gone(before: Snapshot, grace_s: float = DEFAULT_GRACE_S) -> list[str]:
    """Gives leaks ``grace_s`` to go away; returns those that stayed. Blocks its thread.

    Objects in reference cycles are collected first: what they hold is late, not lost.
    """
    leaks = find_leaks(before)
    if leaks:
        gc.collect()
    deadline = time.monotonic() + grace_s
    while leaks and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
        leaks = find_leaks(before)
    return leaks


@contextmanager
def guard_leaks(grace_s: float = DEFAULT_GRACE_S) -> Iterator[None]:
    """Fails if the block leaves anything behind. Use it around ``trio.run``, not inside.

    Test processes that share a machine need a ``TMPDIR`` each, or they see each other's files.

    Raises:
        AssertionError: names what was left.
    """
    before = take_snapshot()
    yield
    leaks = wait_leaks_gone(before, grace_s)
    if leaks:
        raise AssertionError("left behind: " + "; ".join(leaks))


def _is_zmq_collector(thread: threading.Thread) -> bool:
    return (type(thread).__module__, type(thread).__name__) == ZMQ_COLLECTOR


def _describe_children(pids: Iterable[int]) -> Iterator[str]:
    """Child processes, those that ended and were not reaped included."""
    for pid in sorted(pids):
        with suppress(OSError):  # it was reaped meanwhile
            # The state stands after the name, which may hold spaces and parentheses.
            state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            yield f"process {pid} (state {state}) {command[:200]}"


def _child_pids() -> Iterator[str]:
    # Each thread lists the children that it forked. Looking for our children among all
    # processes of the machine would take 10 ms, twice a test.
    for thread in _names_in("/proc/self/task"):
        with suppress(OSError):
            yield from _read(f"/proc/self/task/{thread}/children").split()


def _zmq_contexts() -> Iterator[str]:
    for thread in _names_in("/proc/self/task"):
        with suppress(OSError):
            if _read(f"/proc/self/task/{thread}/comm").strip() == ZMQ_REAPER:
                yield f"ZeroMQ context (its reaper is thread {thread})"


def _pipes_and_sockets() -> Iterator[str]:
    for descriptor in _names_in("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(("pipe:", "socket:")):
                yield f"descriptor {descriptor} of {target}"


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # no /proc here
        return []


def _read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _own_files() -> Iterator[str]:
    # Not tempfile.gettempdir() alone: it remembers its first answer, our sockets do not.
    for folder in {os.environ.get("TMPDIR") or tempfile.gettempdir(), "/dev/shm"}:
        for path in Path(folder).glob(OWN_FILES):
            yield f"file {path}"
