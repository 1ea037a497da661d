"""The owner of a ZeroMQ context and of every socket made in it.

Transport. A context left to the garbage collector hangs in its destructor while a socket lives,
so contexts are closed by a block, and they close their sockets first.
"""

from __future__ import annotations

import math
from itertools import count
from typing import Self

import trio
import zmq

from trio_engine.errors import ConfigError
from trio_engine.transport.monitor import MONITORED_EVENTS
from trio_engine.transport.socket import SocketKind, ZmqSocket

DEFAULT_HIGH_WATER_MARK = 1000
MAX_IDENTITY_BYTES = 255


class ZmqContext:
    """Makes sockets, and on leaving its block closes them all and ends ZeroMQ's threads.

    Use ``with`` outside of Trio (leaving blocks the thread for at most the longest linger) or
    ``async with`` inside (the same wait, in a worker thread, not cancellable).
    """

    def __init__(self) -> None:
        self._raw = zmq.Context()
        self._sockets: set[ZmqSocket] = set()
        self._monitor_numbers = count()

    def socket(
        self,
        kind: SocketKind,
        *,
        identity: bytes | None = None,
        send_hwm: int | None = None,
        receive_hwm: int | None = None,
        linger_s: float = 0.0,
        router_mandatory: bool = False,
        only_connected: bool = False,
        buffer_bytes: int | None = None,
    ) -> ZmqSocket:
        """A new socket.

        Args:
            kind: its type. An XPUB reports every subscription, repeated ones too.
            identity: how a ROUTER at the other end names it, at most 255 bytes.
            send_hwm: messages queued per peer before a send waits, 0 for no limit. None is 1000,
                but for a ROUTER 0, its only choice: full, it drops messages or cannot be waited
                on.
            receive_hwm: messages queued per peer on arrival, 0 for no limit; None is 1000.
            linger_s: how long unsent messages outlive ``close``.
            router_mandatory: sending to an unknown peer is an error, not silence.
            only_connected: messages are queued only for peers that are connected, and lost with
                their connection, so that none lingers for a peer that has left.
            buffer_bytes: kernel buffers of both directions; None is the system's.

        Raises:
            ConfigError: an option is out of range.
            trio.ClosedResourceError: the context was closed.
        """
        if send_hwm is None:
            send_hwm = 0 if kind is SocketKind.ROUTER else DEFAULT_HIGH_WATER_MARK
        if receive_hwm is None:
            receive_hwm = DEFAULT_HIGH_WATER_MARK
        _check_options(kind, identity, send_hwm, receive_hwm, linger_s)
        options = {
            zmq.SNDHWM: send_hwm,
            zmq.RCVHWM: receive_hwm,
            # Set from the start, not only at close: no way out may wait without a bound.
            zmq.LINGER: round(linger_s * 1000),
            zmq.IMMEDIATE: int(only_connected),
            **_optional(kind, identity, buffer_bytes, router_mandatory=router_mandatory),
        }
        made = self._make(kind, options, linger_s)
        self._sockets.add(made)
        return made

    def _make(
        self, kind: SocketKind, options: dict[zmq.SocketOption, int | bytes], linger_s: float
    ) -> ZmqSocket:
        if self._raw.closed:
            raise trio.ClosedResourceError("this context was closed")
        raw = self._raw.socket(kind)
        try:
            for option, value in options.items():
                raw.setsockopt(option, value)
        except zmq.ZMQError as error:
            raw.close(linger=0)
            raise ConfigError(f"{option.name} cannot be {value!r}: {error}") from error
        return ZmqSocket(
            raw,
            kind,
            linger_s=linger_s,
            on_close=self._sockets.discard,
            open_monitor=self._open_monitor,
        )

    def _open_monitor(self, raw: zmq.Socket[bytes]) -> ZmqSocket:
        endpoint = f"inproc://monitor-{next(self._monitor_numbers)}"
        raw.monitor(endpoint, MONITORED_EVENTS)
        # No limit: a full queue would hold up ZeroMQ's own thread, and with it every socket. Not
        # among our sockets: the one that it reports on closes it, in the one order that is safe.
        events = self._make(SocketKind.PAIR, {zmq.RCVHWM: 0, zmq.LINGER: 0}, linger_s=0.0)
        events.connect(endpoint)
        return events

    def close(self) -> None:
        """Closes every socket and ends the context; blocks for at most the longest linger."""
        self._close_sockets()
        self._raw.term()

    async def aclose(self) -> None:
        """``close`` in a worker thread. Cancellation: held off until done, bounded by linger."""
        self._close_sockets()
        with trio.CancelScope(shield=True):
            # Its own limiter: the threads of a service may all be taken, for as long as they like.
            await trio.to_thread.run_sync(self._raw.term, limiter=trio.CapacityLimiter(1))

    def drop_linger(self) -> None:
        """Lets closing discard what is unsent: nobody is there to read it."""
        for made in self._sockets:
            made.drop_linger()

    def _close_sockets(self) -> None:
        # ZeroMQ's term waits for ever while a socket is open, and for the linger of closed ones.
        for made in tuple(self._sockets):
            made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def open_context() -> ZmqContext:
    """A context for a ``with`` or ``async with`` block."""
    return ZmqContext()


def _check_options(
    kind: SocketKind, identity: bytes | None, send_hwm: int, receive_hwm: int, linger_s: float
) -> None:
    for name, value in (("send_hwm", send_hwm), ("receive_hwm", receive_hwm)):
        if value < 0:
            raise ConfigError(f"{name} must be 0 or more, got {value}")
    if kind is SocketKind.ROUTER and send_hwm:
        raise ConfigError(f"send_hwm of a ROUTER must be 0, got {send_hwm}")
    if not 0 <= linger_s < math.inf:
        raise ConfigError(f"linger_s must be 0 or more and finite, got {linger_s}")
    if identity is not None and not 1 <= len(identity) <= MAX_IDENTITY_BYTES:
        raise ConfigError(f"identity must be 1 to 255 bytes, got {identity!r}")


def _optional(
    kind: SocketKind, identity: bytes | None, buffer_bytes: int | None, *, router_mandatory: bool
) -> dict[zmq.SocketOption, int | bytes]:
    options: dict[zmq.SocketOption, int | bytes] = {}
    if identity is not None:
        options[zmq.IDENTITY] = identity
    if buffer_bytes is not None:
        options[zmq.SNDBUF] = options[zmq.RCVBUF] = buffer_bytes
    if router_mandatory:
        options[zmq.ROUTER_MANDATORY] = 1
    if kind is SocketKind.XPUB:
        options[zmq.XPUB_VERBOSE] = 1
    return options
