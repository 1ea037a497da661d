"""The sharing of one descriptor, over a pipe instead of a ZeroMQ socket."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_engine.transport.readiness import Direction, Readiness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FakeSocket:
    """A descriptor with an edge: looking makes it quiet, whatever is ready."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self.events = Direction(0)
        self.readiness = Readiness(self._read, self._look)

    def _look(self) -> int:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 100)
        return self.events

    def signal(self, events: Direction) -> None:
        self.events = events
        os.write(self._write, b"x")

    def duplicate(self) -> int:
        return os.dup(self._read)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
async def fake() -> AsyncIterator[FakeSocket]:
    made = FakeSocket()
    with trio.fail_after(5):
        yield made
    made.close()


BOTH = [
    (Direction.RECEIVE, Direction.SEND),
    (Direction.SEND, Direction.RECEIVE),
]


@pytest.mark.parametrize(("first", "second"), BOTH)
@pytest.mark.parametrize("ready_first", [True, False])
async def test_each_of_two_tasks_is_woken_for_what_it_waits_for(
    fake: FakeSocket, first: Direction, second: Direction, ready_first: bool
) -> None:
    """Whichever of the two holds the descriptor."""
    woken: list[Direction] = []

    async def wait(direction: Direction) -> None:
        await fake.readiness.wait(direction)
        woken.append(direction)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, first)
        await wait_all_tasks_blocked()
        nursery.start_soon(wait, second)
        await wait_all_tasks_blocked()
        order = [first, second] if ready_first else [second, first]
        fake.signal(order[0])
        await wait_all_tasks_blocked()
        assert woken == order[:1]
        fake.signal(order[1])
    assert woken == order


@pytest.mark.parametrize(("first", "second"), BOTH)
async def test_parked_task_takes_the_lead_of_a_cancelled_one(
    fake: FakeSocket, first: Direction, second: Direction
) -> None:
    leader = trio.CancelScope()

    async def lead() -> None:
        with leader:
            await fake.readiness.wait(first)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lead)
        await wait_all_tasks_blocked()
        nursery.start_soon(fake.readiness.wait, second)
        await wait_all_tasks_blocked()
        leader.cancel()
        await wait_all_tasks_blocked()
        assert not fake.readiness.is_waiting(first)
        assert fake.readiness.is_waiting(second)
        fake.signal(second)


@pytest.mark.parametrize(("first", "second"), BOTH)
async def test_look_of_a_third_task_wakes_whom_its_signal_was_for(
    fake: FakeSocket, first: Direction, second: Direction
) -> None:
    """The descriptor is quiet after the look, so nothing else would wake the leader."""
    async with trio.open_nursery() as nursery:
        for direction in (first, second):
            nursery.start_soon(fake.readiness.wait, direction)
            await wait_all_tasks_blocked()
        fake.signal(first | second)
        fake.readiness.look()


async def test_what_is_ready_already_does_not_sleep_but_yields(fake: FakeSocket) -> None:
    fake.events = Direction.SEND
    with assert_checkpoints():
        await fake.readiness.wait(Direction.SEND)


async def test_signal_for_nobody_goes_by(fake: FakeSocket) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.readiness.wait, Direction.RECEIVE)
        await wait_all_tasks_blocked()
        fake.signal(Direction.SEND)
        await wait_all_tasks_blocked()
        assert fake.readiness.is_waiting(Direction.RECEIVE)
        fake.signal(Direction.RECEIVE)


async def test_close_ends_every_wait_and_the_next(fake: FakeSocket) -> None:
    ended: list[Direction] = []

    async def wait(direction: Direction) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await fake.readiness.wait(direction)
        ended.append(direction)

    async with trio.open_nursery() as nursery:
        for direction in Direction:
            nursery.start_soon(wait, direction)
        await wait_all_tasks_blocked()
        fake.readiness.close()
    assert sorted(ended) == list(Direction)
    await wait(Direction.SEND)


async def test_close_beside_the_wake_up_of_the_leader() -> None:
    """Both tasks are woken at once; if the closing one runs first there is nothing to look at."""
    outcomes: set[str] = set()

    async def wait(readiness: Readiness) -> None:
        try:
            await readiness.wait(Direction.RECEIVE)
            outcomes.add("ready")
        except trio.ClosedResourceError:
            outcomes.add("closed")

    with trio.fail_after(10):
        for _ in range(100):
            fake = FakeSocket()
            duplicate = fake.duplicate()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, fake.readiness)
                await wait_all_tasks_blocked()
                fake.signal(Direction.RECEIVE)
                await trio.lowlevel.wait_readable(duplicate)
                fake.readiness.close()
            trio.lowlevel.notify_closing(duplicate)
            os.close(duplicate)
            fake.close()
    assert outcomes == {"ready", "closed"}
