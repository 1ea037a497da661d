"""Messages stay in order, and readers wait for room before they take more."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from tests.tasks.engine_parts import TEST_TIMEOUT_S
from trio_engine.engine.doorbell import Doorbell
from trio_engine.engine.inbox import (
    MAX_LISTS,
    MAX_REST_S,
    REST_PER_DECODING,
    Arrival,
    Inbox,
)
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


async def rest_ends_s(*decoding_s: float) -> list[float]:
    """When the rests of as many readers end, which begin at once, in seconds from then."""
    inbox, start_s, ends_s = Inbox(Doorbell()), trio.current_time(), list[float]()

    async def rest(decoding_s: float) -> None:
        await inbox.rest(decoding_s)
        ends_s.append(trio.current_time() - start_s)

    async with trio.open_nursery() as nursery:
        for number in decoding_s:
            nursery.start_soon(rest, number)
            await wait_all_tasks_blocked()
    return ends_s


async def test_readers_rest_one_after_the_other(autojump_clock: MockClock) -> None:
    ends_s = await rest_ends_s(0.001, 0.002)
    assert ends_s == pytest.approx([REST_PER_DECODING * 0.001, REST_PER_DECODING * 0.003])


async def test_however_many_rest_none_does_for_long(autojump_clock: MockClock) -> None:
    assert await rest_ends_s(*[0.003] * 9) == pytest.approx(
        [REST_PER_DECODING * 0.003, *[MAX_REST_S] * 8]
    )


async def test_a_rest_that_is_over_counts_no_more(autojump_clock: MockClock) -> None:
    inbox = Inbox(Doorbell())
    for _ in range(2):
        start_s = trio.current_time()
        await inbox.rest(0.001)
        assert trio.current_time() - start_s == pytest.approx(REST_PER_DECODING * 0.001)
        await trio.sleep(1.0)
