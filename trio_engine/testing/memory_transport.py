"""Sockets without sockets: what a ``ZmqContext`` makes, in memory, with a peer that a test plays.

Public kit. Messages come whole, in order and at once. A peer has room for so many that it has not
taken; then a sender waits.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Self

import trio

from trio_engine.wire.messages import Frames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.wire.messages import Buffer


class MemoryPeer:
    """The other end of an address. To be used inside Trio.

    Args:
        room: messages of the engine that it takes in ahead of ``take``.

    Attributes:
        inbound: from where the engine's socket receives.
        outbound: to where it sends.
    """

    def __init__(self, room: float) -> None:
        self._to_engine: trio.MemorySendChannel[Frames]
        self._from_engine: trio.MemoryReceiveChannel[Frames]
        self._to_engine, self.inbound = trio.open_memory_channel[Frames](math.inf)
        self.outbound, self._from_engine = trio.open_memory_channel[Frames](room)

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends a message, which waits for its reader however long."""
        self._to_engine.send_nowait(list(frames))

    def take(self) -> list[Frames]:
        """All messages that have come."""
        return _receive_all(self._from_engine)

    def take_unread(self) -> list[Frames]:
        """All messages that nobody has read at the other end."""
        return _receive_all(self.inbound)


class MemorySocket:
    """One end of a ``MemoryNetwork``, with the methods of a ``ZmqSocket`` that an engine uses."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._peer: MemoryPeer

    def connect(self, address: str) -> None:
        """Meets the peer of this address."""
        self._peer = self._network.peer(address)

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Waits until the peer has room. Cancellation: nothing was sent."""
        await self._peer.outbound.send([bytes(frame) for frame in frames])

    async def receive(self) -> Frames:
        """The next message. Cancellation: none is lost."""
        return await self._peer.inbound.receive()

    async def receive_many(self, limit: int) -> list[Frames]:
        """Waits for a message, then takes what is there. Cancellation: none is lost."""
        messages = [await self._peer.inbound.receive()]
        with contextlib.suppress(trio.WouldBlock):
            while len(messages) < limit:
                messages.append(self._peer.inbound.receive_nowait())
        return messages

    def receive_nowait(self) -> Frames:
        """The next message, or trio.WouldBlock."""
        return self._peer.inbound.receive_nowait()

    def drop_linger(self) -> None:
        """Nothing lingers here."""

    async def aclose(self) -> None:
        """Nothing is held here. Cancellation: as good as done."""
        await trio.lowlevel.checkpoint()


class MemoryNetwork:
    """Addresses and their peers; also the context in which an engine makes its sockets."""

    def __init__(self) -> None:
        self._peers: dict[str, MemoryPeer] = {}

    def peer(self, address: str, *, room: float = math.inf) -> MemoryPeer:
        """Who is at this address, whether or not the engine has connected."""
        return self._peers.setdefault(address, MemoryPeer(room))

    def socket(self, kind: object, **options: Any) -> MemorySocket:
        """A socket of any kind."""
        return MemorySocket(self)

    def drop_linger(self) -> None:
        """Nothing lingers here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def _receive_all(channel: trio.MemoryReceiveChannel[Frames]) -> list[Frames]:
    messages = []
    with contextlib.suppress(trio.WouldBlock):
        while True:
            messages.append(channel.receive_nowait())
    return messages
