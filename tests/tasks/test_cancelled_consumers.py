"""Who takes from a queue of ours may be cancelled at any moment: what goes in comes out once."""

from __future__ import annotations

import random
import time
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from tests.tasks.wire_pair import TEST_TIMEOUT_S, open_pair
from trio_engine.engine.doorbell import Doorbell
from trio_engine.engine.inbox import Arrival, Inbox
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.wire.messages import AbortRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio_engine.client.stream import RequestStream

pytestmark = pytest.mark.known_fault(kind="uncancellable-thread")

COUNT = 1_000
DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=COUNT + 1)


class Canceller:
    """Cancels, after some checkpoints, whatever runs in its scope, again and again."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._scope = trio.CancelScope()
        self.num_cancelled = 0

    def next_scope(self) -> trio.CancelScope:
        self._scope = trio.CancelScope()
        return self._scope

    async def run(self) -> None:
        while True:
            for _ in range(self._dice.randrange(1, 5)):
                await trio.lowlevel.checkpoint()
            self.num_cancelled += not self._scope.cancel_called
            self._scope.cancel()


@asynccontextmanager
async def open_canceller(seed: int) -> AsyncIterator[Canceller]:
    canceller = Canceller(random.Random(seed))
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(canceller.run)
            yield canceller
            nursery.cancel_scope.cancel()
    assert canceller.num_cancelled > 20


async def read(stream: RequestStream, received: list[int]) -> None:
    async for output in stream:
        received += output.token_ids


async def test_a_streams_reader_loses_no_token_and_gets_none_twice() -> None:
    received: list[int] = []
    async with open_pair() as (client, wire), client.generate([1], DELTA) as stream:
        request_id = (await wire.receive_add()).request_id
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def send() -> None:
                for token in range(COUNT):
                    await wire.send_tokens(request_id, [token])
                await wire.send_tokens(request_id, [], FinishReason.LENGTH)

            async with open_canceller(1) as canceller:
                while len(received) < COUNT:
                    with canceller.next_scope():
                        await read(stream, received)
    assert received == list(range(COUNT))


async def test_a_streams_reader_on_a_busy_loop_with_deadlines_that_have_passed_loses_nothing() -> (
    None
):
    """Each turn takes longer than the deadline, so that it has passed whenever an item comes."""
    received, num_tokens = list[int](), 100
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], DELTA) as stream:
            request_id = (await wire.receive_add()).request_id
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep_busy, 0.002)
                for token in range(num_tokens):
                    if token % 5 == 0:
                        with trio.move_on_after(0.0005):
                            await read(stream, received)
                    await wire.send_tokens(request_id, [token])
                await wire.send_tokens(request_id, [], FinishReason.LENGTH)
                await read(stream, received)
                nursery.cancel_scope.cancel()
    assert received == list(range(num_tokens))


async def keep_busy(turn_s: float) -> None:
    while True:
        until = time.monotonic() + turn_s
        while time.monotonic() < until:
            pass
        await trio.lowlevel.checkpoint()


def ids_in(inbox: Inbox) -> list[str]:
    messages = [arrival.message for arrival in inbox.take()]
    return [m.request_ids[0] for m in messages if isinstance(m, AbortRequest)]


@pytest.mark.parametrize("make_scope", [trio.CancelScope, lambda: trio.move_on_after(0)])
async def test_what_a_cancelled_reader_has_read_is_in_the_inbox_room_or_not(
    make_scope: Callable[[], trio.CancelScope],
) -> None:
    inbox = Inbox(Doorbell())
    for number in range(20):
        with make_scope() as scope:
            scope.cancel()
            await inbox.put([Arrival(0, AbortRequest([str(number)]))])
    assert ids_in(inbox) == [str(number) for number in range(20)]


async def test_readers_that_are_cancelled_at_random_lose_no_message() -> None:
    """One reader after the other, as many as it takes, with a loop that takes now and then."""
    inbox, taken, dice = Inbox(Doorbell()), list[str](), random.Random(2)
    unread = deque(str(number) for number in range(COUNT))

    async def read_requests() -> None:
        while unread:
            await inbox.put([Arrival(0, AbortRequest([unread.popleft()]))])

    async with open_canceller(3) as canceller:
        while unread:
            with canceller.next_scope():
                await read_requests()
            if dice.random() < 0.2:
                taken += ids_in(inbox)
    taken += ids_in(inbox)
    assert sorted(taken, key=int) == [str(number) for number in range(COUNT)]


async def test_who_waits_at_a_doorbell_never_sleeps_beside_something_to_do() -> None:
    doorbell, to_do, done = Doorbell(), deque[int](), list[int]()

    async def work() -> None:
        while True:
            await doorbell.wait()
            while to_do:
                done.append(to_do.popleft())

    async with open_canceller(4) as canceller, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            for number in range(COUNT):
                to_do.append(number)
                doorbell.ring()
                await trio.lowlevel.checkpoint()

        while len(done) < COUNT:
            with canceller.next_scope():
                await work()
    assert done == list(range(COUNT))
