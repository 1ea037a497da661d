"""Who is connected to a socket, as ZeroMQ reports it.

Transport: imports zmq. A connection is the descriptor that ZeroMQ uses for it: a message says by
which it came, and here it is told when that one closes. So a peer that is killed without a word is
noticed while nobody sends anything.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Protocol

import trio
import zmq

if TYPE_CHECKING:
    from trio_engine.wire.messages import Frames

_EVENT = struct.Struct("=Hi")
_OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
MONITORED_EVENTS = _OPENED | zmq.EVENT_DISCONNECTED


class EventSource(Protocol):
    """What a monitor needs of the socket by which ZeroMQ reports; see ``ZmqSocket``."""

    async def receive(self) -> Frames:
        """The next report."""

    def receive_nowait(self) -> Frames:
        """The next report, or trio.WouldBlock."""


class ConnectionMonitor:
    """The open connections of one socket. Made by ``ZmqSocket.monitor``.

    A task has to ``run`` it: ZeroMQ keeps what nobody reads. Any number of tasks may wait.
    """

    def __init__(self, events: EventSource) -> None:
        self._events = events
        self._connections: set[int] = set()
        self._had_any = False
        self._is_closed = False
        self._changes = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Reads reports until the socket is closed. Cancellation: no report is lost."""
        try:
            while True:
                self._note(await self._events.receive())
        except trio.ClosedResourceError:
            self._is_closed = True
            self._changes.unpark_all()

    async def wait_closed(self, connection: int) -> None:
        """Returns when a connection by which something has come is closed.

        Raises:
            trio.ClosedResourceError: the socket was closed, by us.

        Cancellation: nothing is left behind.
        """
        await trio.lowlevel.checkpoint()
        self._catch_up()
        while connection in self._connections:
            await self._wait_change()

    async def wait_all_left(self) -> None:
        """Returns when somebody has been connected and nobody is. Otherwise as ``wait_closed``."""
        await trio.lowlevel.checkpoint()
        self._catch_up()
        while self._connections or not self._had_any:
            await self._wait_change()

    async def _wait_change(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("the monitored socket was closed")
        await self._changes.park()

    def _catch_up(self) -> None:
        # ZeroMQ reports a connection before it delivers what comes by it, so that is here now.
        with contextlib.suppress(trio.WouldBlock, trio.ClosedResourceError):
            while True:
                self._note(self._events.receive_nowait())

    def _note(self, frames: Frames) -> None:
        event, connection = _EVENT.unpack(frames[0])
        if event & _OPENED:
            self._connections.add(connection)
            self._had_any = True
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.discard(connection)
        self._changes.unpark_all()
