"""The countdown to leaving without the forward thread. No thread here: time may jump."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_engine.engine.exit import ExitGuard, ExitStatus

if TYPE_CHECKING:
    from collections.abc import Callable


class Leaver:
    """Notes when and how it was told to leave."""

    def __init__(self) -> None:
        self.left: list[tuple[float, ExitStatus]] = []

    async def leave(self, status: ExitStatus) -> None:
        await trio.lowlevel.checkpoint()
        self.left.append((trio.current_time(), status))


async def run_guard(
    do: Callable[[ExitGuard], object], leaver: Leaver, until_s: float = 100
) -> None:
    """Starts a guard, does something with it, and disarms it much later."""
    guard = ExitGuard(leaver.leave)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guard.run)
        await wait_all_tasks_blocked()
        do(guard)
        await trio.sleep(until_s)
        guard.disarm()


async def test_it_leaves_after_the_grace(autojump_clock: MockClock) -> None:
    leaver = Leaver()
    await run_guard(lambda guard: guard.arm(2.0, ExitStatus.CRASHED), leaver)
    assert leaver.left == [(2.0, ExitStatus.CRASHED)]


async def test_without_a_grace_it_leaves_at_once(autojump_clock: MockClock) -> None:
    leaver = Leaver()
    await run_guard(lambda guard: guard.arm(0.0, ExitStatus.STOPPED), leaver)
    assert leaver.left == [(0.0, ExitStatus.STOPPED)]


async def test_it_sleeps_until_it_is_armed(autojump_clock: MockClock) -> None:
    leaver = Leaver()
    await run_guard(lambda guard: guard.shorten(1.0), leaver)
    assert leaver.left == []


async def test_disarmed_in_time_it_does_not_leave(autojump_clock: MockClock) -> None:
    leaver = Leaver()
    await run_guard(lambda guard: guard.arm(2.0, ExitStatus.STOPPED), leaver, until_s=1.9)
    assert leaver.left == []


async def test_disarmed_while_it_leaves_it_stops(autojump_clock: MockClock) -> None:
    """The thread has returned after all: the orderly way is open again."""
    reached = False

    async def leave(_status: ExitStatus) -> None:
        nonlocal reached
        reached = True
        await trio.sleep_forever()

    guard = ExitGuard(leave)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guard.run)
        guard.arm(1.0, ExitStatus.STOPPED)
        await trio.sleep(2)
        assert reached
        guard.disarm()


@pytest.mark.parametrize(("shorter_s", "left_at_s"), [(0.5, 0.5), (5.0, 2.0)])
async def test_a_grace_can_only_become_shorter(
    autojump_clock: MockClock, shorter_s: float, left_at_s: float
) -> None:
    def do(guard: ExitGuard) -> None:
        guard.arm(2.0, ExitStatus.STOPPED)
        guard.shorten(shorter_s)

    leaver = Leaver()
    await run_guard(do, leaver)
    assert leaver.left == [(left_at_s, ExitStatus.STOPPED)]


async def test_it_outlives_the_cancellation_that_it_guards(autojump_clock: MockClock) -> None:
    leaver = Leaver()
    guard = ExitGuard(leaver.leave)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guard.run)
        await wait_all_tasks_blocked()
        guard.arm(2.0, ExitStatus.STOPPED)
        nursery.cancel_scope.cancel()
    assert leaver.left == [(2.0, ExitStatus.STOPPED)]


async def test_a_process_of_somebody_else_is_not_left(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trio_engine")
    guard = ExitGuard(None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guard.run)
        guard.arm(2.0, ExitStatus.STOPPED)
    assert trio.current_time() == 2.0
    assert "forward_thread_busy waiting=unbounded" in caplog.text
