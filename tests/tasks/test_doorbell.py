"""Rings are kept, merged, and end with the bell."""

from __future__ import annotations

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_engine.engine.doorbell import Doorbell


async def test_rings_while_nobody_waits_are_one() -> None:
    doorbell = Doorbell()
    doorbell.ring()
    doorbell.ring()
    with assert_checkpoints():
        await doorbell.wait()
    with trio.move_on_after(0) as scope:
        await doorbell.wait()
    assert scope.cancelled_caught


async def test_a_ring_wakes_who_waits(autojump_clock: trio.testing.MockClock) -> None:
    doorbell = Doorbell()
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(doorbell.wait)
            await wait_all_tasks_blocked()
            doorbell.ring()


async def test_a_cancelled_wait_keeps_the_ring() -> None:
    doorbell = Doorbell()
    doorbell.ring()
    with trio.CancelScope() as scope:
        scope.cancel()
        await doorbell.wait()
    assert scope.cancelled_caught
    await doorbell.wait()


async def test_closing_leaves_one_last_look() -> None:
    doorbell = Doorbell()
    doorbell.ring()
    doorbell.close()
    doorbell.close()
    doorbell.ring()  # silent
    await doorbell.wait()
    for _ in range(2):
        with pytest.raises(trio.EndOfChannel):
            await doorbell.wait()


async def test_closing_wakes_who_waits(autojump_clock: trio.testing.MockClock) -> None:
    doorbell = Doorbell()

    async def wait_for_the_end() -> None:
        with pytest.raises(trio.EndOfChannel):
            await doorbell.wait()

    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_the_end)
            await wait_all_tasks_blocked()
            doorbell.close()
