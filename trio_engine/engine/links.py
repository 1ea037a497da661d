"""The links to all clients: their sockets, their reader and writer tasks, and the last words.

Engine. Readers live in the work nursery and end with it; writers live outside of it, each under a
shield of its own that only the deadline for the last words ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import trio

from trio_engine.engine.pumps import OutputWriter, read_requests
from trio_engine.transport.base import MessageSocket
from trio_engine.transport.socket import SocketKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_engine.core.outbox import Outbox
    from trio_engine.engine.step_loop import StepLoop
    from trio_engine.transport.base import MessageConnections, MessageContext
    from trio_engine.wire.messages import EngineZmqAddresses

logger = logging.getLogger(__name__)

# Few messages may hide in ZeroMQ: behind them outputs merge in the outbox, whose size is bounded.
OUTPUT_SEND_HWM = 16


class _WayOut(msgspec.Struct, eq=False):
    """One client's way out.

    ``scope`` shields the writer's task, ``watch`` the one that looks whether the client is there.
    """

    client_index: int
    writer: OutputWriter
    socket: MessageSocket
    scope: trio.CancelScope = msgspec.field(default_factory=lambda: trio.CancelScope(shield=True))
    watch: trio.CancelScope = msgspec.field(default_factory=lambda: trio.CancelScope(shield=True))
    closing: trio.Event = msgspec.field(default_factory=trio.Event)
    client_has_left: bool = False
    done: trio.Event = msgspec.field(default_factory=trio.Event)


class ClientLinks:
    """Connections to every client that INIT named.

    Args:
        context: of the sockets.
        identity: routing identity of the input sockets.
        clock: of message timestamps.
        linger_s: how long sent messages may outlive the engine's last wait for them.
    """

    def __init__(
        self,
        context: MessageContext,
        identity: bytes,
        *,
        clock: Callable[[], float],
        linger_s: float,
    ) -> None:
        self._context = context
        self._identity = identity
        self._clock = clock
        self._linger_s = linger_s
        self._ways_out: list[_WayOut] = []

    async def open(
        self,
        addresses: EngineZmqAddresses,
        loop: StepLoop,
        announcement: bytes,
        *,
        readers: trio.Nursery,
        writers: trio.Nursery,
    ) -> None:
        """Connects, starts all tasks, and announces the engine on each input.

        Raises:
            ConfigError: an address cannot be connected to.
        """
        outboxes: Sequence[Outbox] = loop.core.outboxes
        for outbox, address in zip(outboxes, addresses.outputs, strict=True):
            socket = self._context.socket(
                SocketKind.PUSH,
                send_hwm=OUTPUT_SEND_HWM,
                linger_s=self._linger_s,
                only_connected=True,
            )
            connections = socket.monitor()
            socket.connect(address)
            writer = OutputWriter(socket, outbox, self._clock, loop.phases)
            way_out = _WayOut(outbox.client_index, writer, socket)
            self._ways_out.append(way_out)
            writers.start_soon(self._write, way_out, name=f"writer {address}")
            writers.start_soon(self._watch, way_out, connections, name=f"client at {address}")
        pairs = zip(outboxes, self._ways_out, addresses.inputs, strict=True)
        for outbox, way_out, address in pairs:
            # With a high-water mark, what a client sends faster than it is read stays its own.
            socket = self._context.socket(SocketKind.DEALER, identity=self._identity)
            socket.connect(address)
            # A ROUTER cannot send to a peer that has not spoken first.
            await socket.send([announcement])
            readers.start_soon(
                read_requests,
                socket,
                outbox,
                way_out.writer.room,
                loop.inbox,
                loop.is_backed_up,
                name=f"reader {address}",
            )

    def flush(self, client_index: int) -> None:
        """Sends what is in a client's outbox, now or as soon as there is room."""
        self._ways_out[client_index].writer.flush()

    def close(self, flush_timeout_s: float) -> None:
        """Lets the writers send what is left and end, at the latest after the timeout.

        For a client that has left nobody waits.
        """
        deadline = trio.current_time() + flush_timeout_s
        for way_out in self._ways_out:
            way_out.scope.deadline = min(way_out.scope.deadline, deadline)
            way_out.writer.close()
            way_out.closing.set()

    async def wait_flushed(self) -> None:
        """Returns when every writer has ended; after ``close`` that is within its timeout."""
        for way_out in self._ways_out:
            await way_out.done.wait()

    async def _write(self, way_out: _WayOut) -> None:
        client_index = way_out.client_index
        try:
            with way_out.scope:
                await way_out.writer.run()
            if way_out.scope.cancelled_caught and not way_out.client_has_left:
                logger.warning("outputs_dropped client=%d", client_index)
                way_out.socket.drop_linger()  # its client had its time
        except Exception:
            if not way_out.closing.is_set():
                raise
            # The engine has ended already, well or not, and this does not change how.
            logger.exception("outputs_lost client=%d", client_index)
        finally:
            way_out.watch.cancel()
            way_out.done.set()

    async def _watch(self, way_out: _WayOut, connections: MessageConnections) -> None:
        with way_out.watch:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connections.run)
                await way_out.closing.wait()
                # Only now: until then it may come back, and its outputs are kept for it.
                await connections.wait_all_left()
                way_out.client_has_left = True
                way_out.scope.cancel()
