"""By which connections an engine came, and the news that it has left without a word.

For engines whose process is somebody else's; that of one's own is watched by ``supervision``. A
connection that was lost is never taken up again, though ZeroMQ would: what was on its way is gone
with it, and a request or an answer among it would be waited for without end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trio_engine.transport.monitor import ConnectionMonitor

LAST_OUTPUTS_LIMIT_S = 1.0
"""How long an engine's last outputs may be on their way once its input has closed. Waiters are
promised the news of its end within 2 s."""

HAND_ON_S = 0.1
"""Between the end of a connection and the news of it: what came by it last is in the socket's
buffer, and ZeroMQ's thread hands it on within a few ms."""


class EngineConnections:
    """The connections of the one engine that a front end waits for.

    Args:
        handshake: monitor of the handshake socket.
        inputs: of the input socket.
        outputs: of the output socket.
    """

    def __init__(
        self, handshake: ConnectionMonitor, inputs: ConnectionMonitor, outputs: ConnectionMonitor
    ) -> None:
        self._handshake = handshake
        self._inputs = inputs
        self._outputs = outputs
        self._greeted_by: int | None = None
        self._announced_by: int | None = None
        self._greeted = trio.Event()
        self._is_ready = False

    async def run(self) -> None:
        """Follows them until the sockets are closed. Run by one task."""
        async with trio.open_nursery() as nursery:
            for monitor in (self._handshake, self._inputs, self._outputs):
                nursery.start_soon(monitor.run)

    def note_status(self, connection: int) -> None:
        """It said HELLO, or after that READY."""
        self._is_ready = self._greeted.is_set()
        self._greeted_by = connection
        self._greeted.set()

    def note_announcement(self, connection: int) -> None:
        """Its ready response has come: what is sent to it goes by this connection."""
        self._announced_by = connection

    async def wait_left_start_up(self) -> bool:
        """Waits until its handshake connection has ended; True if that was before READY."""
        await self._greeted.wait()
        assert self._greeted_by is not None
        try:
            await self._handshake.wait_closed(self._greeted_by)
        except trio.ClosedResourceError:
            return False  # by us: the handshake is over
        await trio.sleep(HAND_ON_S)
        return not self._is_ready

    async def wait_left(self) -> None:
        """Returns when it has left and its last outputs are here. After its announcement.

        Both sockets of a process that ends are closed at once, but outputs may be on their way
        still, for as long as it lingers.
        """
        assert self._announced_by is not None
        await self._inputs.wait_closed(self._announced_by)
        with trio.move_on_after(LAST_OUTPUTS_LIMIT_S):
            await self._outputs.wait_all_left()
        await trio.sleep(HAND_ON_S)
