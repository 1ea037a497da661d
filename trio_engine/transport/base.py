"""What an engine asks of its transport: sockets of whole messages, and their owner.

Transport. ``ZmqContext`` and ``ZmqSocket`` are the ones in service; the testing kit has others that
need neither sockets nor threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.transport.socket import SocketKind
    from trio_engine.wire.messages import Buffer, Frames


class MessageConnections(Protocol):
    """The peers of one socket; see ``ConnectionMonitor``."""

    async def run(self) -> None:
        """Follows them until the socket is closed."""

    async def wait_all_left(self) -> None:
        """Returns when somebody has been connected and nobody is."""


class MessageSocket(Protocol):
    """One end of connections that carry multipart messages; see ``ZmqSocket``."""

    def connect(self, address: str) -> None:
        """Connects in the background; ConfigError if that can never be."""

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Queues a message, waiting for room. Cancellation: none of it was queued."""

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """Queues a message, or trio.WouldBlock: there is no room, and none of it was queued."""

    async def receive(self) -> Frames:
        """The next message. Cancellation: none is lost."""

    async def receive_many(self, limit: int) -> list[Frames]:
        """Waits for a message, then takes what has arrived. Cancellation: none is lost."""

    def receive_nowait(self) -> Frames:
        """The next message, or trio.WouldBlock."""

    def monitor(self) -> MessageConnections:
        """Has it told who connects and who leaves; once, before ``connect``."""

    def drop_linger(self) -> None:
        """Lets closing discard what is unsent."""

    async def aclose(self) -> None:
        """Closes. Cancellation: it is closed in any case."""


class MessageContext(Protocol):
    """Makes sockets, and closes them at the end of its block; see ``ZmqContext``."""

    def socket(
        self,
        kind: SocketKind,
        *,
        identity: bytes | None = None,
        send_hwm: int | None = None,
        linger_s: float = 0.0,
        only_connected: bool = False,
    ) -> MessageSocket:
        """A new socket."""

    def drop_linger(self) -> None:
        """Lets closing discard what is unsent on all of them."""

    async def aclose(self) -> None:
        """Closes all. Cancellation: held off until done, bounded by the longest linger."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
