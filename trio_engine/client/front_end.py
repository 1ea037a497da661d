"""The front end's sockets, and the start-up of the engines that connect to them.

Knows sockets and the handshake's state machine. Processes belong to ``process`` and ``launcher``,
requests to ``async_client``.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from trio_engine.client.connections import EngineConnections
from trio_engine.errors import ConfigError, EngineStartError, ProtocolError
from trio_engine.transport.context import open_context
from trio_engine.transport.ipc import IpcDirectory
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.handshake import FrontEndHandshake
from trio_engine.wire.messages import EngineZmqAddresses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from trio_engine.transport.socket import ZmqSocket
    from trio_engine.wire.handshake import ExpectedEngine, HandshakeStep
    from trio_engine.wire.messages import Frames, ReadyResponse

logger = logging.getLogger(__name__)

ABORT_LINGER_S = 0.5
"""How long an ABORT that was just sent outlives the input socket. An engine that listens has it
within a round trip; one that does not must not hold up its client."""

MESSAGES_PER_ENGINE = 2
"""HELLO and READY: what each engine says on the handshake socket in an orderly start."""

WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "[::]"})


class FrontEnd:
    """Bound sockets of one client. Made by ``open_front_end``, which closes them.

    Attributes:
        handshake_address: where engines say HELLO; a port that was left open is filled in.
        input: to engines, a ROUTER: frames begin with an engine's identity, and one that is not
            connected is an error.
        output: from all engines, a PULL.
        connections: by which the engine came; of the last one, if there are several.
    """

    def __init__(
        self,
        handshake: ZmqSocket,
        handshake_address: str,
        input_socket: ZmqSocket,
        output: ZmqSocket,
        addresses: EngineZmqAddresses,
        connections: EngineConnections,
    ) -> None:
        self.handshake_address = handshake_address
        self.input = input_socket
        self.output = output
        self.connections = connections
        self._handshake = handshake
        self._addresses = addresses
        self._start_up: FrontEndHandshake | None = None

    def describe_timeout(self, timeout_s: float) -> str:
        """That the engines were not ready in time, and what they had not said by then."""
        unsaid = [] if self._start_up is None else self._start_up.missing()
        missing = ", ".join(unsaid) or "its tokenizer"
        return f"no engine was ready within {timeout_s:g} s (start_timeout_s); missing: {missing}"

    async def wait_engines_ready(
        self, expected: Iterable[ExpectedEngine]
    ) -> dict[int, ReadyResponse | None]:
        """Brings up the expected engines, then closes the handshake socket.

        Handshake and ready responses are read one after the other: ZeroMQ keeps what comes
        early, and one task needs no nursery whose group would wrap the error.

        Returns:
            By engine index, what each announced; None for an empty announcement.

        Raises:
            EngineStartError: an expected engine broke the protocol.

        Cancellation: start-up is undone by closing the sockets; nothing else is held.
        """
        expected = tuple(expected)
        self._start_up = machine = FrontEndHandshake(self._addresses, expected)
        try:
            await self._hear_statuses(machine, len(expected))
            while not machine.is_complete:
                connection, frames = await self.input.receive_from()
                if _counts(machine.receive_ready_response(frames)):
                    self.connections.note_announcement(connection)
        except ProtocolError as error:
            raise EngineStartError(f"an engine broke the start-up protocol: {error}") from error
        await self._handshake.aclose()
        return machine.ready_responses

    async def _hear_statuses(self, machine: FrontEndHandshake, num_engines: int) -> None:
        num_heard = 0
        while num_heard < MESSAGES_PER_ENGINE * num_engines:
            connection, frames = await self._handshake.receive_from()
            step = machine.receive(frames)
            if _counts(step):
                num_heard += 1
                self.connections.note_status(connection)
            if step.reply is not None:
                await self._reply(step.reply)

    async def _reply(self, frames: Frames) -> None:
        try:
            await self._handshake.send(frames)
        except trio.BrokenResourceError:
            # Gone between its HELLO and our answer. Whoever watches its process or its
            # connection, or the deadline, says so.
            logger.warning("engine_left_during_start_up")


def _counts(step: HandshakeStep) -> bool:
    if step.ignored is not None:
        logger.warning("start_up_message_ignored reason=%s", step.ignored)
    return step.ignored is None


@asynccontextmanager
async def open_front_end(handshake_address: str | None = None) -> AsyncIterator[FrontEnd]:
    """Binds the sockets, and on leaving closes them and ends their ZeroMQ context.

    Addresses are bound first and told to engines after that, so there is no port to lose in
    between.

    Args:
        handshake_address: where engines expect a front end; None for a private ``ipc://`` one.

    Raises:
        ConfigError: the address is malformed, taken, or not one that engines could connect to.
    """
    with _data_addresses(handshake_address) as addresses:
        private_handshake, input_address, output_address = addresses
        async with open_context() as context:
            handshake = context.socket(SocketKind.ROUTER, router_mandatory=True)
            input_socket = context.socket(
                SocketKind.ROUTER, router_mandatory=True, linger_s=ABORT_LINGER_S
            )
            output = context.socket(SocketKind.PULL)
            connections = EngineConnections(
                handshake.monitor(), input_socket.monitor(), output.monitor()
            )
            bound = handshake.bind(handshake_address or private_handshake)
            yield FrontEnd(
                handshake,
                bound,
                input_socket,
                output,
                EngineZmqAddresses(
                    inputs=[input_socket.bind(input_address)],
                    outputs=[output.bind(output_address)],
                ),
                connections,
            )


@contextmanager
def _data_addresses(handshake_address: str | None) -> Iterator[tuple[str, str, str]]:
    """Addresses to bind for handshake, input and output.

    Beside a TCP handshake they are on the same host, at ports that the system picks.
    """
    if handshake_address is not None and handshake_address.startswith("tcp://"):
        host = handshake_address.removeprefix("tcp://").rpartition(":")[0]
        if host in WILDCARD_HOSTS:
            raise ConfigError(
                f"handshake address {handshake_address!r} names no host: engines are told to"
                " connect to the same one, so give an address of this machine"
            )
        yield handshake_address, f"tcp://{host}:0", f"tcp://{host}:0"
        return
    with IpcDirectory() as directory:
        yield directory.address("handshake"), directory.address("in"), directory.address("out")
