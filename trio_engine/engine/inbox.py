"""Decoded messages on their way from the readers to the step loop.

Engine. A memory channel, and beside it what readers held when they were cancelled: they have taken
it from their sockets, so nobody else could answer it.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import msgspec
import trio

from trio_engine.wire.codec import UndecodableRequest
from trio_engine.wire.messages import EngineCoreMessage

if TYPE_CHECKING:
    from trio_engine.engine.doorbell import Doorbell, ThreadSafeDoorbell

# Lists of messages. The step loop empties the inbox each turn, so it fills only while one turn
# computes; readers then wait, and ZeroMQ holds the backlog.
MAX_LISTS = 8

# How long readers rest after messages whose requests can only wait, in times of their decoding. To
# take them in costs about two and a half times that, so a burst has a third of the loop's time, and
# bursts of several clients half of it: at full speed one leaves a device that is the CPU one core
# less. Measured on 2 cores, 2,000 requests of 1,000 tokens beside 32 streams: the 99th percentile
# of the time between two tokens grows 3.4 to 3.9 times without a rest and 1.5 to 1.7 times with it,
# with the model 3.1 to 3.7 and 1.8 to 2.2.
REST_PER_DECODING = 5.0
# So long at most, however many clients send bursts, and also where decoding took long because other
# programs had the cores: an ABORT may be waiting.
MAX_REST_S = 0.02

# How long readers go on with floods at the end, all together: 5,000 requests of 1,000 tokens take
# 0.2 s, and an engine whose owner has gone must be gone 2 s later.
LAST_READING_S = 0.5


class Arrival(msgspec.Struct):
    """A message and the client by whose socket it came, or what could be read of a bad one."""

    client_index: int
    message: EngineCoreMessage | UndecodableRequest


class Inbox:
    """What readers put in and one step loop takes out.

    Args:
        doorbell: rung when something was put in.
    """

    def __init__(self, doorbell: Doorbell | ThreadSafeDoorbell) -> None:
        self._doorbell = doorbell
        self._sender: trio.MemorySendChannel[list[Arrival]]
        self._receiver: trio.MemoryReceiveChannel[list[Arrival]]
        self._sender, self._receiver = trio.open_memory_channel[list[Arrival]](MAX_LISTS)
        self._last: list[Arrival] = []
        self._reading_end_s: float | None = None
        # By Trio's clock. One for all readers, or each of three would have its third of the time.
        self._rest_end_s = -math.inf
        # Whether anything came since the last look, be it still in a waiting ``put``.
        self._has_news = False

    async def put(self, arrivals: list[Arrival]) -> None:
        """Adds messages in the order in which they came; waits while the inbox is full.

        Cancellation: they are in the inbox all the same.
        """
        self._has_news = True
        try:
            await self._sender.send(arrivals)
        except trio.Cancelled:
            self.put_last(arrivals)
            raise
        self._doorbell.ring()

    async def rest(self, decoding_s: float) -> None:
        """Waits after messages that took so long to decode, and behind the rests of other readers.

        Cancellation: others rest as long as without it.
        """
        now_s = trio.current_time()
        end_s = max(now_s, self._rest_end_s) + REST_PER_DECODING * decoding_s
        self._rest_end_s = min(now_s + MAX_REST_S, end_s)
        await trio.sleep_until(self._rest_end_s)

    def put_nowait(self, arrivals: list[Arrival]) -> None:
        """``put`` or trio.WouldBlock."""
        self._has_news = True
        self._sender.send_nowait(arrivals)
        self._doorbell.ring()

    def put_last(self, arrivals: list[Arrival]) -> None:
        """Adds what a client has sent last, room or not: its reader ends."""
        self._has_news = True
        self._last += arrivals
        self._doorbell.ring()

    def is_time_up(self) -> bool:
        """Whether readers that end have gone on for long enough since the first of them asked."""
        now_s = trio.current_time()
        if self._reading_end_s is None:
            self._reading_end_s = now_s + LAST_READING_S
        return now_s >= self._reading_end_s

    def take(self) -> list[Arrival]:
        """Everything, each client's in its order; readers may go on."""
        if not self._has_news:
            return []
        self._has_news = False
        arrivals: list[Arrival] = []
        with contextlib.suppress(trio.WouldBlock):
            while True:
                arrivals += self._receiver.receive_nowait()
        last, self._last = self._last, []
        return arrivals + last
