"""Rings are kept, merged, and end with the bell."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from tests.tasks.engine_parts import TEST_TIMEOUT_S
from trio_engine.engine.doorbell import Doorbell, ThreadSafeDoorbell

if TYPE_CHECKING:
    from collections.abc import Iterator

AnyDoorbell = Doorbell | ThreadSafeDoorbell


@pytest.fixture(params=[Doorbell, ThreadSafeDoorbell])
def doorbell(request: pytest.FixtureRequest) -> Iterator[AnyDoorbell]:
    with ExitStack() as stack:
        made: AnyDoorbell = request.param()
        if isinstance(made, ThreadSafeDoorbell):
            stack.enter_context(made)
        yield made


async def test_rings_while_nobody_waits_are_one(doorbell: AnyDoorbell) -> None:
    doorbell.ring()
    doorbell.ring()
    with assert_checkpoints():
        await doorbell.wait()
    with trio.move_on_after(0) as scope:
        await doorbell.wait()
    assert scope.cancelled_caught


async def test_a_ring_wakes_who_waits(
    doorbell: AnyDoorbell, autojump_clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(doorbell.wait)
            await wait_all_tasks_blocked()
            doorbell.ring()


async def test_a_cancelled_wait_keeps_the_ring(doorbell: AnyDoorbell) -> None:
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


async def test_no_ring_of_another_thread_is_lost() -> None:
    """Whoever waits after what was put down before a ring has seen it, at whatever moment."""
    put_down = deque[int]()

    def put_down_and_ring(doorbell: ThreadSafeDoorbell, numbers: range) -> None:
        for number in numbers:
            put_down.append(number)
            doorbell.ring()

    seen: list[int] = []
    with trio.fail_after(TEST_TIMEOUT_S), ThreadSafeDoorbell() as doorbell:
        threads = [
            threading.Thread(target=put_down_and_ring, args=(doorbell, range(start, 5000, 2)))
            for start in range(2)
        ]
        for thread in threads:
            thread.start()
        while len(seen) < 5000:
            await doorbell.wait()
            while put_down:
                seen.append(put_down.popleft())
        for thread in threads:
            thread.join()
    assert sorted(seen) == list(range(5000))


def test_a_ring_after_the_end_is_silent() -> None:
    with ThreadSafeDoorbell() as doorbell:
        pass
    doorbell.ring()
