"""A ZeroMQ socket that Trio tasks can wait on.

Transport: with its neighbours the only importer of zmq, whose errors never leave here.
Knows frames, not what they mean. How waiting works is explained in ``readiness``.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec
import trio
import zmq

from trio_engine.errors import ConfigError
from trio_engine.transport.addresses import (
    check_address,
    check_ipc_is_free,
    check_target,
    needs_ipv6,
    remove_socket_file,
)
from trio_engine.transport.frames import (
    MessageWriter,
    connection_of,
    contents_of,
    flat_views,
    take_message,
    translated,
)
from trio_engine.transport.monitor import ConnectionMonitor
from trio_engine.transport.readiness import Direction, Readiness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_engine.wire.messages import Buffer, Frames


class SocketKind(enum.IntEnum):
    """The socket types that the protocol uses, and PAIR, by which ZeroMQ reports connections."""

    ROUTER = zmq.ROUTER
    DEALER = zmq.DEALER
    PUSH = zmq.PUSH
    PULL = zmq.PULL
    XPUB = zmq.XPUB
    XSUB = zmq.XSUB
    PAIR = zmq.PAIR


class ZmqSocketStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one socket since it was made.

    ``uncopied_frames_in_flight``: frames whose memory ZeroMQ still reads from.
    """

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    uncopied_frames_in_flight: int
    tasks_waiting_receive: int
    tasks_waiting_send: int
    closed: bool


class _Exclusive:
    """Lets one task at a time into a block."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._is_taken = False

    def __enter__(self) -> None:
        if self._is_taken:
            raise trio.BusyResourceError(f"another task is {self._doing} this socket")
        self._is_taken = True

    def __exit__(self, *_: object) -> None:
        self._is_taken = False


class ZmqSocket(trio.abc.AsyncResource):
    """One ZeroMQ socket. Made by ``ZmqContext.socket``, which also closes it at the latest.

    One task may receive while another sends; a second at either gets ``trio.BusyResourceError``.
    A received frame is bytes, or from 64 KiB on a read-only view of ZeroMQ's own memory. A sent
    frame of that size is not copied if it is bytes or a read-only view: by that the caller says
    that the memory will not change. Writable memory is always copied, so that it may be used
    again at once.
    """

    def __init__(
        self,
        raw: zmq.Socket[bytes],
        kind: SocketKind,
        *,
        linger_s: float,
        on_close: Callable[[ZmqSocket], object],
        open_monitor: Callable[[zmq.Socket[bytes]], ZmqSocket],
    ) -> None:
        self._raw = raw
        self._kind = kind
        self._linger_ms = round(linger_s * 1000)
        self._on_close = on_close
        self._open_monitor = open_monitor
        self._monitor: ZmqSocket | None = None
        self._closed = False
        self._bound: list[str] = []
        descriptor = raw.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self._readiness = Readiness(descriptor, self._poll_events)
        self._writer = MessageWriter(raw)
        self._receiving = _Exclusive("receiving from")
        self._sending = _Exclusive("sending to")
        self._messages_sent = self._messages_received = 0
        self._bytes_sent = self._bytes_received = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<ZmqSocket {self._kind.name} {state}>"

    def bind(self, address: str) -> str:
        """Listens, and returns the real endpoint (``tcp://127.0.0.1:0`` gets its port).

        A socket file left by a crash is replaced.

        Raises:
            ConfigError: the address is malformed, too long, or taken.
            trio.ClosedResourceError: this socket was closed.
        """
        self._require_open()
        check_address(address)
        check_ipc_is_free(address)
        self._attach(self._raw.bind, address)
        endpoint = self._raw.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._bound.append(endpoint.rstrip(b"\0").decode())
        return self._bound[-1]

    def connect(self, address: str) -> None:
        """Connects in the background, also before the other side listens.

        Raises:
            ConfigError: the address is malformed, too long, or names no port.
            trio.ClosedResourceError: this socket was closed.
        """
        self._require_open()
        check_target(address)
        self._attach(self._raw.connect, address)

    def _attach(self, attach: Callable[[str], object], address: str) -> None:
        try:
            if needs_ipv6(address):
                self._raw.setsockopt(zmq.IPV6, 1)
            attach(address)
        except (zmq.ZMQError, UnicodeError) as error:
            raise ConfigError(f"cannot use address {address!r}: {error}") from error
        finally:
            self._readiness.look()  # binding and connecting process commands too

    def monitor(self) -> ConnectionMonitor:
        """Has ZeroMQ report who connects and who leaves; once, before ``bind`` or ``connect``.

        Raises:
            trio.ClosedResourceError: this socket was closed.
        """
        self._require_open()
        self._monitor = self._open_monitor(self._raw)
        return ConnectionMonitor(self._monitor)

    async def receive(self) -> Frames:
        """The next message.

        Raises:
            trio.ClosedResourceError: this socket was closed, also while waiting.
            trio.BusyResourceError: another task is receiving.

        Cancellation: a message is either returned or stays queued, never lost.
        """
        return (await self.receive_many(1))[0]

    async def receive_many(self, limit: int) -> list[Frames]:
        """Waits for a message, then takes what has arrived, at most ``limit``.

        Raises:
            trio.ClosedResourceError: this socket was closed, also while waiting.
            trio.BusyResourceError: another task is receiving.

        Cancellation: messages are either returned or stay queued, never lost.
        """
        if limit < 1:
            raise ValueError(f"limit must be 1 or more, got {limit}")
        return [contents_of(message) for message in await self._receive(limit)]

    async def receive_from(self) -> tuple[int, Frames]:
        """``receive``, and the connection that it came by, as ``monitor`` calls it."""
        (message,) = await self._receive(1)
        return connection_of(message), contents_of(message)

    async def _receive(self, limit: int) -> list[list[zmq.Frame]]:
        await trio.lowlevel.checkpoint_if_cancelled()
        with self._receiving:
            messages = self._take(limit)
            if messages:
                await trio.lowlevel.cancel_shielded_checkpoint()
            while not messages:
                await self._readiness.wait(Direction.RECEIVE)
                messages = self._take(limit)  # no cancellation from here on
            return messages

    def receive_nowait(self) -> Frames:
        """The next message if there is one.

        Raises:
            trio.WouldBlock: there is none.
            trio.ClosedResourceError: this socket was closed.
        """
        messages = self._take(1)
        if not messages:
            raise trio.WouldBlock
        return contents_of(messages[0])

    def _take(self, limit: int) -> list[list[zmq.Frame]]:
        self._require_open()
        messages: list[list[zmq.Frame]] = []
        try:
            while len(messages) < limit:
                messages.append(take_message(self._raw))
        except zmq.ZMQError as error:
            # Any other error comes up again at the next call: what was taken goes first.
            if error.errno != zmq.EAGAIN and not messages:
                raise translated(error) from error
        finally:
            self._readiness.look()
        self._messages_received += len(messages)
        self._bytes_received += sum(len(frame) for message in messages for frame in message)
        return messages

    async def send(self, frames: Sequence[Buffer]) -> None:
        """Queues one message, waiting while the high-water mark is reached.

        Raises:
            trio.BrokenResourceError: a ROUTER with ``router_mandatory`` does not know the peer.
            trio.ClosedResourceError: this socket was closed, also while waiting.
            trio.BusyResourceError: another task is sending.

        Cancellation: either the whole message was queued and this returns, or none of it was.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        with self._sending:
            if self._put(frames):
                await trio.lowlevel.cancel_shielded_checkpoint()
                return
            while True:
                await self._readiness.wait(Direction.SEND)
                if self._put(frames):  # no cancellation from here on
                    return

    def send_nowait(self, frames: Sequence[Buffer]) -> None:
        """Queues one message if the high-water mark allows. May overtake a waiting ``send``.

        Raises:
            trio.WouldBlock: it does not; nothing was queued.
            trio.BrokenResourceError: a ROUTER with ``router_mandatory`` does not know the peer.
            trio.ClosedResourceError: this socket was closed.
        """
        if not self._put(frames):
            raise trio.WouldBlock

    def _put(self, frames: Sequence[Buffer]) -> bool:
        """Whether the message was queued, whole; if not, nothing of it was."""
        self._require_open()
        views = flat_views(frames)
        try:
            self._writer.put(views)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise translated(error) from error
        finally:
            self._readiness.look()
        self._messages_sent += 1
        self._bytes_sent += sum(view.nbytes for view in views)
        return True

    def close(self) -> None:
        """Closes; waiting tasks get ``ClosedResourceError``. Unsent messages linger (bounded)."""
        if self._closed:
            return
        self._closed = True
        self._readiness.close()
        # Before the listener ends: afterwards the file could be somebody else's.
        for endpoint in self._bound:
            remove_socket_file(endpoint)
        if self._monitor is not None:
            # In this order: ZeroMQ's own thread, and with it every socket of the context, would
            # wait for ever to report to one that is closed.
            self._raw.monitor(None, 0)
            self._monitor.close()
        self._raw.close(linger=self._linger_ms)
        self._on_close(self)

    def drop_linger(self) -> None:
        """Lets ``close`` discard what is unsent."""
        self._linger_ms = 0

    async def aclose(self) -> None:
        """``close`` and a checkpoint. Cancellation: the socket is closed in any case."""
        self.close()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> ZmqSocketStatistics:
        """Counts for tests and monitoring."""
        return ZmqSocketStatistics(
            messages_sent=self._messages_sent,
            messages_received=self._messages_received,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            uncopied_frames_in_flight=self._writer.num_frames_in_flight,
            tasks_waiting_receive=int(self._readiness.is_waiting(Direction.RECEIVE)),
            tasks_waiting_send=int(self._readiness.is_waiting(Direction.SEND)),
            closed=self._closed,
        )

    def _poll_events(self) -> int:
        events = self._raw.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return events

    def _require_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this socket was closed")
