"""Threads that are left behind: nobody waits for them, and they are counted until they return."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_engine.engine.abandonable_threads import AbandonableThreads
from trio_engine.errors import OverloadedError

TIMEOUT_S = 10.0


class Blocker:
    """A function that returns when it is let."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self._may_return = threading.Event()

    def run(self) -> str:
        self.started.set()
        assert self._may_return.wait(TIMEOUT_S)
        return "returned"

    def release(self) -> None:
        self._may_return.set()


async def abandon(threads: AbandonableThreads, blocker: Blocker) -> None:
    """Leaves a thread behind that is in the function."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run_sync, blocker.run)
        await trio.to_thread.run_sync(blocker.started.wait, TIMEOUT_S)
        nursery.cancel_scope.cancel()


async def wait_returned(threads: AbandonableThreads) -> None:
    with trio.fail_after(TIMEOUT_S):
        while threads.num_abandoned:  # noqa: ASYNC110  # a thread's own end has no event
            await trio.sleep(0.001)


async def test_results_and_errors_come_back() -> None:
    def fail() -> NoReturn:
        raise ValueError("from the thread")

    threads = AbandonableThreads(1)
    assert await threads.run_sync(max, 3, 4) == 4
    with pytest.raises(ValueError, match="from the thread"):
        await threads.run_sync(fail)
    assert threads.num_abandoned == 0


async def test_a_cancelled_call_returns_at_once_and_its_thread_is_counted() -> None:
    threads, blocker = AbandonableThreads(1), Blocker()
    await abandon(threads, blocker)
    assert threads.num_abandoned == 1
    blocker.release()
    await wait_returned(threads)


async def test_threads_that_are_left_behind_do_not_hold_up_others() -> None:
    threads = AbandonableThreads(3)
    blockers = [Blocker(), Blocker()]
    for blocker in blockers:
        await abandon(threads, blocker)
    with trio.fail_after(TIMEOUT_S):
        assert await threads.run_sync(max, 1, 2) == 2
    for blocker in blockers:
        blocker.release()
    await wait_returned(threads)


async def test_only_so_many_may_be_left_behind() -> None:
    threads, blocker = AbandonableThreads(1), Blocker()
    await abandon(threads, blocker)
    with pytest.raises(OverloadedError, match="1 threads go on that nobody waits for"):
        await threads.run_sync(max, 1, 2)
    blocker.release()
    await wait_returned(threads)
    assert await threads.run_sync(max, 1, 2) == 2


async def test_a_call_that_is_cancelled_before_it_starts_leaves_nothing() -> None:
    threads = AbandonableThreads(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await threads.run_sync(max, 1, 2)
    assert scope.cancelled_caught
    assert threads.num_abandoned == 0


def test_the_end_of_the_run_does_not_wait() -> None:
    blocker = Blocker()
    threads = AbandonableThreads(1)

    async def run() -> None:
        await abandon(threads, blocker)
        await wait_all_tasks_blocked()

    trio.run(run)
    assert threads.num_abandoned == 1
    blocker.release()
