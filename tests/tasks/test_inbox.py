"""Messages stay in order, and readers wait for room before they take more."""

from __future__ import annotations

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from tests.tasks.engine_parts import TEST_TIMEOUT_S
from trio_engine.engine.doorbell import Doorbell
from trio_engine.engine.inbox import MAX_LISTS, Arrival, Inbox
from trio_engine.wire.messages import AbortRequest


def arrivals(*names: str) -> list[Arrival]:
    return [Arrival(0, AbortRequest([name])) for name in names]


def names_in(inbox: Inbox) -> list[str]:
    messages = [arrival.message for arrival in inbox.take()]
    return [m.request_ids[0] for m in messages if isinstance(m, AbortRequest)]


async def test_everything_is_taken_in_order_and_once() -> None:
    inbox = Inbox(Doorbell())
    await inbox.put(arrivals("a", "b"))
    inbox.put_nowait(arrivals("c"))
    assert names_in(inbox) == ["a", "b", "c"]
    assert names_in(inbox) == []


async def test_putting_rings() -> None:
    for put in ("put_nowait", "put_last"):
        doorbell = Doorbell()
        getattr(Inbox(doorbell), put)(arrivals("a"))
        with trio.fail_after(TEST_TIMEOUT_S):
            await doorbell.wait()
    doorbell = Doorbell()
    with assert_checkpoints():
        await Inbox(doorbell).put(arrivals("a"))
    with trio.fail_after(TEST_TIMEOUT_S):
        await doorbell.wait()


def full_inbox() -> Inbox:
    inbox = Inbox(Doorbell())
    for _ in range(MAX_LISTS):
        inbox.put_nowait(arrivals("early"))
    return inbox


async def test_readers_wait_while_it_is_full() -> None:
    inbox = full_inbox()
    with pytest.raises(trio.WouldBlock):
        inbox.put_nowait(arrivals("late"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.put, arrivals("x"))
        await wait_all_tasks_blocked()
        nursery.start_soon(inbox.put, arrivals("y"))
        await wait_all_tasks_blocked()
        assert names_in(inbox) == ["early"] * MAX_LISTS + ["x", "y"]


async def test_what_a_cancelled_reader_held_is_taken_once_and_last() -> None:
    inbox = full_inbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.put, arrivals("held"))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    inbox.put_last(arrivals("arrived"))
    assert names_in(inbox) == ["early"] * MAX_LISTS + ["held", "arrived"]
    assert names_in(inbox) == []
