"""Waiting on ZeroMQ's edge-triggered descriptor, for a receiver and a sender of one socket.

Transport, without zmq.

The descriptor is readable while the socket has commands that it has not processed: "a message
came", "there is room again". Any call on the socket may process them, and then the descriptor is
quiet although the socket is ready. So nobody may sleep on an old look, and whoever has touched
the socket must look at its events and wake those whom they concern. Two tasks cannot wait for
one descriptor in Trio: one leads, the other parks, and takes over when the leader leaves.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable


class Direction(enum.IntFlag):
    """What a task waits for. Values are those of ZMQ_POLLIN and ZMQ_POLLOUT."""

    RECEIVE = 1
    SEND = 2


class _Waiter:
    """One sleeping task. Cancelling its scope wakes it wherever it sleeps."""

    __slots__ = ("is_ready", "scope")

    def __init__(self) -> None:
        self.is_ready = False
        self.scope = trio.CancelScope()

    def wake(self) -> None:
        self.scope.cancel()


class Readiness:
    """Tells at most one receiver and one sender when to try again.

    Args:
        descriptor: ZeroMQ's, as is.
        poll_events: processes pending commands and returns the ready directions.
    """

    def __init__(self, descriptor: int, poll_events: Callable[[], int]) -> None:
        self._descriptor = descriptor
        self._poll_events = poll_events
        self._waiters: dict[Direction, _Waiter] = {}
        self._leader: _Waiter | None = None  # the one in wait_readable
        self._closed = False

    def is_waiting(self, direction: Direction) -> bool:
        """Whether a task sleeps for this direction."""
        return direction in self._waiters

    def look(self) -> None:
        """To be called after any operation on the socket: wakes whom it has made ready."""
        if not self._waiters or self._closed:
            return
        events = self._poll_events()
        for direction, waiter in self._waiters.items():
            if events & direction:
                waiter.is_ready = True
                waiter.wake()

    async def wait(self, direction: Direction) -> None:
        """Sleeps until trying again makes sense.

        To be called when an attempt would have blocked, with no checkpoint in between. May return
        for nothing. Cancellation: takes nothing from the socket, and hands the lead on.

        Raises:
            trio.ClosedResourceError: ``close`` was called.
        """
        waiter = self._waiters[direction] = _Waiter()
        try:
            self.look()
            if waiter.is_ready:
                await trio.lowlevel.checkpoint()
            while not waiter.is_ready:
                await self._sleep(waiter)
        finally:
            del self._waiters[direction]
            if self._leader is None:
                for other in self._waiters.values():
                    other.wake()

    async def _sleep(self, waiter: _Waiter) -> None:
        """Until ready, or until woken to lead."""
        if self._closed:
            raise trio.ClosedResourceError("this socket was closed")
        with trio.CancelScope() as waiter.scope:
            if self._leader is not None:
                await trio.sleep_forever()
            self._leader = waiter
            try:
                await trio.lowlevel.wait_readable(self._descriptor)
            finally:
                self._leader = None
        self.look()

    def close(self) -> None:
        """Ends every wait with ``ClosedResourceError``. To be called before the socket closes."""
        self._closed = True
        if self._leader is not None:
            trio.lowlevel.notify_closing(self._descriptor)
        for waiter in self._waiters.values():
            waiter.wake()
