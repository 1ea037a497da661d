"""The client over the wire: its sockets' messages, and the two tasks that move them.

Start-up of engines is in ``front_end``, processes are in ``launcher``.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trio_engine.client.async_client import AsyncEngineClient
from trio_engine.client.sender import MessageSender
from trio_engine.errors import ProtocolError
from trio_engine.wire.codec import OutputsDecoder, is_engine_core_dead
from trio_engine.wire.handshake import engine_identity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

    from trio_engine.client.front_end import FrontEnd
    from trio_engine.client.service_tasks import ServiceTasks
    from trio_engine.errors import EngineDeadError
    from trio_engine.text.processor import TextProcessor
    from trio_engine.transport.socket import ZmqSocket
    from trio_engine.wire.messages import Buffer, Frames, ReadyResponse

logger = logging.getLogger(__name__)

RECEIVE_BATCH = 32
"""Messages applied between two checkpoints. One holds a step's tokens of every request, some 6 µs
each, so that the caller's tasks wait a few ms at worst (2026-11, 2 shared cores)."""


class WireSender(MessageSender):
    """Sends by a ROUTER that engines are connected to, which stays its owner's."""

    def __init__(self, socket: ZmqSocket, engine_indices: Iterable[int]) -> None:
        super().__init__(engine_indices)
        self._socket = socket

    async def _send(self, engine_index: int, frames: Frames) -> None:
        await self._socket.send([engine_identity(engine_index), *frames])


async def receive_outputs(client: AsyncEngineClient, socket: ZmqSocket) -> None:
    """Hands engines' messages to the client until it has died or this is cancelled.

    A message that cannot be decoded costs a log line: what else comes is still good.
    """
    decoder = OutputsDecoder()
    try:
        while not client.is_dead:
            for frames in await socket.receive_many(RECEIVE_BATCH):
                await _receive(client, decoder, frames)
    except Exception as error:  # task boundary: whatever it is, callers must hear of it
        logger.exception("receiver_ended")
        await client.notice_death("this client's receiver ended", error)


async def _receive(
    client: AsyncEngineClient, decoder: OutputsDecoder, frames: Sequence[Buffer]
) -> None:
    if is_engine_core_dead(frames):
        await client.notice_death("it reported a fatal error")
        return
    try:
        outputs = decoder.decode(frames)
    except ProtocolError as error:
        logger.warning("output_undecodable num_frames=%d reason=%s", len(frames), error)
        return
    client.apply(outputs)


@asynccontextmanager
async def open_wire_client(
    front_end: FrontEnd,
    engines: Mapping[int, ReadyResponse | None],
    text: TextProcessor,
    *,
    max_in_flight: int | None,
    explain_death: Callable[[str], Awaitable[EngineDeadError]],
    tasks: ServiceTasks,
) -> AsyncIterator[AsyncEngineClient]:
    """A client on bound sockets, with its tasks running. Arguments: see ``AsyncEngineClient``."""
    client = AsyncEngineClient(
        WireSender(front_end.input, engines),
        engines,
        text,
        max_in_flight=max_in_flight,
        explain_death=explain_death,
    )
    tasks.start_soon(client.run_sender)
    tasks.start_soon(receive_outputs, client, front_end.output)
    try:
        yield client
    finally:
        await client.aclose()
