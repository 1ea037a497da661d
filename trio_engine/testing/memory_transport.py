"""Sockets without sockets: a ``MessageContext`` in memory, whose peers a test plays.

Public kit. Messages come whole, in order and at once, unless a test holds them up or breaks the
link. A peer has room for so many messages that it has not taken; then a sender waits.
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
        is_held_up: whether what it sends stays on the way, until ``let_through``.
        is_broken: whether ``break_off`` was called.
    """

    def __init__(self, room: float) -> None:
        self._to_engine: trio.MemorySendChannel[Frames]
        self._from_engine: trio.MemoryReceiveChannel[Frames]
        self._to_engine, self.inbound = trio.open_memory_channel[Frames](math.inf)
        self.outbound, self._from_engine = trio.open_memory_channel[Frames](room)
        self.is_held_up = False
        self.is_broken = False
        self._on_the_way: list[Frames] = []

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends a message, which waits for its reader however long; over a broken link, none."""
        if self.is_broken:
            return
        self._on_the_way.append(list(frames))
        if not self.is_held_up:
            self.let_through()

    @property
    def num_held_up(self) -> int:
        """Messages on the way."""
        return len(self._on_the_way)

    def let_through(self) -> None:
        """What was held up arrives, all together, and nothing is held up any more."""
        self.is_held_up = False
        for frames in self._on_the_way:
            self._to_engine.send_nowait(frames)
        self._on_the_way.clear()

    @property
    def has_mail(self) -> bool:
        """Whether ``take`` has anything to give."""
        return not self.is_broken and self._from_engine.statistics().current_buffer_used > 0

    def take(self) -> list[Frames]:
        """All messages that have come."""
        return [] if self.is_broken else _receive_all(self._from_engine)

    def take_unread(self) -> list[Frames]:
        """All messages that nobody has read at the other end."""
        on_the_way, self._on_the_way = self._on_the_way, []
        return _receive_all(self.inbound) + on_the_way

    def break_off(self) -> None:
        """From now on the engine's socket raises BrokenResourceError, once all is received.

        What is on the way, in either direction, is lost.
        """
        self.is_broken = True
        self._on_the_way.clear()
        self._to_engine.close()
        self._from_engine.close()


class NobodyLeaves:
    """Peers that stay connected; a ``MessageConnections``."""

    async def run(self) -> None:
        """There is nothing to follow."""
        await trio.sleep_forever()

    async def wait_all_left(self) -> None:
        """Never returns."""
        await trio.sleep_forever()


class MemorySocket:
    """One end of a ``MemoryNetwork``, of any kind; a ``MessageSocket``."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._peer: MemoryPeer

    def connect(self, address: str) -> None:
        """Meets the peer of this address."""
        self._peer = self._network.peer(address)

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Waits until the peer has room; BrokenResourceError if the link is broken.

        Cancellation: nothing was sent.
        """
        await self._peer.outbound.send([bytes(frame) for frame in frames])

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """The same, or trio.WouldBlock."""
        self._peer.outbound.send_nowait([bytes(frame) for frame in frames])

    async def receive(self) -> Frames:
        """The next message, or BrokenResourceError. Cancellation: none is lost."""
        try:
            return await self._peer.inbound.receive()
        except trio.EndOfChannel:
            raise trio.BrokenResourceError("the link is broken") from None

    async def receive_many(self, limit: int) -> list[Frames]:
        """Waits as ``receive`` does, then takes what is there. Cancellation: none is lost."""
        messages = [await self.receive()]
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
            while len(messages) < limit:
                messages.append(self._peer.inbound.receive_nowait())
        return messages

    def receive_nowait(self) -> Frames:
        """The next message, or trio.WouldBlock."""
        try:
            return self._peer.inbound.receive_nowait()
        except trio.EndOfChannel:
            raise trio.WouldBlock from None

    def monitor(self) -> NobodyLeaves:
        """Peers here stay until the end."""
        return NobodyLeaves()

    def drop_linger(self) -> None:
        """Nothing lingers here."""

    async def aclose(self) -> None:
        """Nothing is held here. Cancellation: as good as done."""
        await trio.lowlevel.checkpoint()


class MemoryNetwork:
    """Addresses and their peers; also the ``MessageContext`` of an engine."""

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

    async def aclose(self) -> None:
        """Nothing is held here. Cancellation: as good as done."""
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _receive_all(channel: trio.MemoryReceiveChannel[Frames]) -> list[Frames]:
    messages = []
    with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel, trio.BrokenResourceError):
        while True:
            messages.append(channel.receive_nowait())
    return messages
