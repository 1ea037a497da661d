"""Messages stay in order, and readers wait for room before they take more."""

from __future__ import annotations

import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

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
    inbox.put(arrivals("a", "b"))
    inbox.put(arrivals("c"))
    assert names_in(inbox) == ["a", "b", "c"]
    assert names_in(inbox) == []


async def test_putting_rings() -> None:
    doorbell = Doorbell()
    Inbox(doorbell).put(arrivals("a"))
    with trio.fail_after(1):
        await doorbell.wait()


async def test_readers_wait_while_it_is_full(autojump_clock: trio.testing.MockClock) -> None:
    inbox = Inbox(Doorbell())
    order: list[str] = []

    async def read(name: str) -> None:
        await inbox.wait_room()
        order.append(name)
        inbox.put(arrivals(name))

    for _ in range(MAX_LISTS - 1):
        inbox.put(arrivals("early"))
    with assert_checkpoints():
        await inbox.wait_room()
    inbox.put(arrivals("last"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, "x")
        nursery.start_soon(read, "y")
        await wait_all_tasks_blocked()
        assert order == []
        assert names_in(inbox)[-1] == "last"
    assert sorted(order) == ["x", "y"]


async def test_what_was_taken_from_a_socket_is_put_in_even_when_full() -> None:
    inbox = Inbox(Doorbell())
    for _ in range(MAX_LISTS + 1):
        inbox.put(arrivals("a"))
    assert len(inbox.take()) == MAX_LISTS + 1
