"""A doorbell: any synchronous code rings it, one task waits; rings while nobody waits are one.

Engine. A memory channel of capacity 1 underneath: what is waiting to be done lies elsewhere (an
outbox, a deque), so a second ring has nothing to add to the first.
"""

from __future__ import annotations

import contextlib

import trio


class Doorbell:
    """Wakes the one task that works off something."""

    def __init__(self) -> None:
        self._ringer: trio.MemorySendChannel[None]
        self._listener: trio.MemoryReceiveChannel[None]
        self._ringer, self._listener = trio.open_memory_channel[None](1)

    def ring(self) -> None:
        """Wakes the waiting task, or lets its next wait return at once. Silent once closed."""
        with contextlib.suppress(trio.WouldBlock, trio.ClosedResourceError):
            self._ringer.send_nowait(None)

    async def wait(self) -> None:
        """Returns after a ring.

        Raises:
            trio.EndOfChannel: closed, and every ring before that has been waited for.

        Cancellation: the ring is kept.
        """
        await self._listener.receive()

    def close(self) -> None:
        """Lets the waiting task end, after a last look if it was rung."""
        self._ringer.close()
