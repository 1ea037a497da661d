"""Doorbells: whoever has put something down rings, and one task comes to look.

Engine. What is waiting to be done lies elsewhere (an outbox, a deque), so a second ring has nothing
to add to the first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from typing import Self


class Doorbell:
    """Wakes the one task that works off something; rung by code that runs in Trio.

    A memory channel of capacity 1 underneath.

    Attributes:
        is_awaited: whether the task waits.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self._ringer: trio.MemorySendChannel[None]
        self._listener: trio.MemoryReceiveChannel[None]
        self._ringer, self._listener = trio.open_memory_channel[None](1)

    def ring(self) -> None:
        """Wakes the waiting task, or lets its next wait return at once. Silent once closed."""
        try:  # noqa: SIM105 - contextlib.suppress would double what a ring costs
            self._ringer.send_nowait(None)
        except (trio.WouldBlock, trio.ClosedResourceError):
            pass

    async def wait(self) -> None:
        """Returns after a ring.

        Raises:
            trio.EndOfChannel: closed, and every ring before that has been waited for.

        Cancellation: the ring is kept.
        """
        self.is_awaited = True
        try:
            await self._listener.receive()
        finally:
            self.is_awaited = False

    def close(self) -> None:
        """Lets the waiting task end, after a last look if it was rung."""
        self._ringer.close()


class ThreadSafeDoorbell:
    """Wakes the one task that works off something; rung on any thread.

    A pipe underneath, which wakes the task itself: by way of ``run_sync_soon``, a callback and a
    memory channel the way to a thread and back took 120 us, and takes 55 so. To be used as a
    context manager, around everything that rings or waits.
    """

    def __init__(self) -> None:
        self._listener = self._ringer = -1
        self._is_rung = False
        self._is_closed = False

    def ring(self) -> None:
        """Wakes the waiting task, or lets its next wait return at once. Silent once closed."""
        # Two threads may both find it silent: then two bytes are read at once. It is never full.
        if not self._is_rung and not self._is_closed:
            self._is_rung = True
            os.write(self._ringer, b"\0")

    async def wait(self) -> None:
        """Returns after a ring, rarely for none. Cancellation: the ring is kept."""
        if self._is_rung:
            await trio.lowlevel.checkpoint()  # half of what it costs to wait for the pipe
        else:
            await trio.lowlevel.wait_readable(self._listener)
        try:  # noqa: SIM105 - contextlib.suppress would cost more than the rest
            os.read(self._listener, 64)
        except BlockingIOError:
            pass  # its byte comes later, and ends a wait for nothing
        # In this order: who rings in between has put down what is looked at after this.
        self._is_rung = False

    def __enter__(self) -> Self:
        self._listener, self._ringer = os.pipe()
        os.set_blocking(self._listener, False)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        os.close(self._ringer)
        os.close(self._listener)
