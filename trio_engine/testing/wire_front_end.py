"""A front end that a test plays by hand: real sockets and the real protocol, no client behind them.

Public kit. Imports neither torch nor pytest. For what a client should do, use a client; this one
also says what no client should.
"""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import trio

from trio_engine.errors import EngineDeadError
from trio_engine.testing.core_driver import RequestLog
from trio_engine.testing.requests import make_request
from trio_engine.transport.context import open_context
from trio_engine.transport.ipc import IpcDirectory
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import OutputsDecoder, RequestEncoder, is_engine_core_dead
from trio_engine.wire.handshake import ExpectedEngine, FrontEndHandshake, engine_identity
from trio_engine.wire.messages import AbortRequest, EngineZmqAddresses, UtilityCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.outputs import EngineCoreOutputs, UtilityOutput
    from trio_engine.transport.socket import ZmqSocket
    from trio_engine.wire.messages import EngineCoreMessage, Frames, ReadyResponse


class WireFrontEnd:
    """The front end's end of the wire, for one engine and any number of clients.

    As an async context manager it binds a private address for the handshake and, for each client,
    one for its input and one for its output; leaving closes them without a word, as
    a process that dies does. Nothing is read but by the methods that say so.

    Args:
        num_clients: API servers that the engine is told of.
        engine: which engine is expected.
        receive_hwm: outputs that ZeroMQ takes in ahead of ``next_outputs``, 0 for no limit.
        host: whose TCP ports to bind in place of ``ipc://`` sockets.

    Attributes:
        handshake_address: where the engine is to connect.
        ready_response: what the engine announced, after ``start_up``.
        logs: by (client index, request id), what was heard of the latest request of that id.

    Example::

        async with WireFrontEnd() as front_end, trio.open_nursery() as nursery:
            nursery.start_soon(run_engine, front_end.handshake_address)
            await front_end.start_up()
            await front_end.add("x", [1, 2, 3], max_tokens=4)
            assert len((await front_end.finish("x")).token_ids) == 4
    """

    handshake_address: str

    def __init__(
        self,
        num_clients: int = 1,
        *,
        engine: ExpectedEngine | None = None,
        receive_hwm: int | None = None,
        host: str | None = None,
    ) -> None:
        self.num_clients = num_clients
        self.ready_response: ReadyResponse | None = None
        self.logs: dict[tuple[int, str], RequestLog] = {}
        self._engine = engine or ExpectedEngine(0, local=True)
        self._identity = engine_identity(self._engine.index)
        self._receive_hwm = receive_hwm
        self._host = host
        self._encoder = RequestEncoder()
        self._decoder = OutputsDecoder()
        self._call_ids = itertools.count(1)
        self._answers: dict[int, UtilityOutput] = {}
        self._stack = AsyncExitStack()
        self._addresses: EngineZmqAddresses
        self._handshake: ZmqSocket
        self._inputs: list[ZmqSocket] = []
        self._outputs: list[ZmqSocket] = []

    async def __aenter__(self) -> Self:
        directory = self._stack.enter_context(IpcDirectory())
        context = await self._stack.enter_async_context(open_context())
        self._handshake = context.socket(SocketKind.ROUTER)
        self.handshake_address = self._handshake.bind(self._address(directory, "handshake"))
        self._addresses = EngineZmqAddresses(inputs=[], outputs=[])
        for index in range(self.num_clients):
            # A message to the engine outlives a sender that leaves at once.
            inbound = context.socket(SocketKind.ROUTER, linger_s=0.5)
            outbound = context.socket(SocketKind.PULL, receive_hwm=self._receive_hwm)
            self._addresses.inputs.append(inbound.bind(self._address(directory, f"in{index}")))
            self._addresses.outputs.append(outbound.bind(self._address(directory, f"out{index}")))
            self._inputs.append(inbound)
            self._outputs.append(outbound)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _address(self, directory: IpcDirectory, name: str) -> str:
        return directory.address(name) if self._host is None else f"tcp://{self._host}:0"

    @property
    def addresses(self) -> EngineZmqAddresses:
        """What INIT tells; change it before ``start_up`` to tell something else."""
        return self._addresses

    # Start-up

    async def start_up(self) -> None:
        """The whole handshake, up to READY and the ready response on every input.

        Raises:
            ProtocolError: the engine broke the protocol.
        """
        machine = await self.greet()
        await self.wait_ready(machine)

    async def greet(self) -> FrontEndHandshake:
        """HELLO and INIT only. ``wait_ready`` takes what this returns."""
        machine = FrontEndHandshake(self._addresses, [self._engine])
        step = machine.receive(await self._handshake.receive())
        assert step.reply is not None
        await self._handshake.send(step.reply)
        return machine

    async def wait_ready(self, machine: FrontEndHandshake) -> None:
        """READY, then the ready response on every input."""
        machine.receive(await self._handshake.receive())
        for index in range(self.num_clients):
            frames = await self.receive_announcement(index)
            if index == 0:
                machine.receive_ready_response(frames)
        self.ready_response = machine.ready_responses[self._engine.index]

    async def receive_announcement(self, client: int = 0) -> Frames:
        """The ready response, identity first: after it a client's input reaches the engine.

        ``start_up`` takes it. By itself it is for a front end that is told of by another one.
        """
        return await self._inputs[client].receive()

    async def receive_handshake(self) -> Frames:
        """The next frames on the handshake socket, identity first."""
        return await self._handshake.receive()

    async def send_handshake(self, frames: Sequence[bytes]) -> None:
        """Any bytes at all to the engine's handshake socket."""
        await self._handshake.send([self._identity, *frames])

    # To the engine

    def listen(self, request_id: str, *, client: int = 0) -> RequestLog:
        """Starts the log of a request's life. ``add`` does so; for an ADD sent as frames."""
        log = self.logs[(client, request_id)] = RequestLog()
        return log

    async def add(
        self, request_id: str, prompt_token_ids: list[int], *, client: int = 0, **params: Any
    ) -> None:
        """Sends an ADD and starts its log. ``params`` are ``SamplingParams``'s; greedy if none."""
        self.listen(request_id, client=client)
        await self.send(make_request(request_id, prompt_token_ids, client=client, **params), client)

    async def abort(self, *request_ids: str, client: int = 0) -> None:
        """Sends an ABORT."""
        await self.send(AbortRequest(list(request_ids)), client)

    async def post_utility(self, method: str, *args: Any, client: int = 0) -> int:
        """Sends a utility call and returns its id, for ``wait_answer``."""
        call_id = next(self._call_ids)
        await self.send(UtilityCall(client, call_id, method, list(args)), client)
        return call_id

    async def send(self, message: EngineCoreMessage, client: int = 0) -> None:
        """Sends any message by a client's input."""
        await self.send_frames(self._encoder.encode(message), client)

    async def send_frames(self, frames: Sequence[bytes | memoryview], client: int = 0) -> None:
        """Sends any bytes at all by a client's input."""
        await self._inputs[client].send([self._identity, *frames])

    # From the engine

    async def receive_frames(self, client: int = 0) -> Frames:
        """The next frames for a client, as they came."""
        return await self._outputs[client].receive()

    async def next_outputs(self, client: int = 0) -> EngineCoreOutputs:
        """The next message for a client; logs and answers are kept up to date.

        Raises:
            EngineDeadError: it is ENGINE_CORE_DEAD.
            AssertionError: it tells of a request after its end, or of one that nobody added.
        """
        frames = await self.receive_frames(client)
        if is_engine_core_dead(frames):
            raise EngineDeadError("the engine sent ENGINE_CORE_DEAD")
        message = self._decoder.decode(frames)
        for output in message.outputs:
            log = self.logs.get((client, output.request_id))
            assert log is not None, f"output for {output.request_id!r}, which nobody added"
            assert log.finish_reason is None, f"output after the end of {output.request_id!r}"
            log.outputs.append(output)
            log.token_ids.extend(output.new_token_ids)
            log.finish_reason = output.finish_reason
        if message.utility_output is not None:
            self._answers[message.utility_output.call_id] = message.utility_output
        return message

    async def finish(self, request_id: str, *, client: int = 0) -> RequestLog:
        """Reads a client's messages until a request of it has its terminal output."""
        log = self.logs[(client, request_id)]
        while log.finish_reason is None:
            await self.next_outputs(client)
        return log

    async def wait_num_tokens(self, request_id: str, count: int, *, client: int = 0) -> RequestLog:
        """Reads a client's messages until a request of it has at least so many tokens."""
        log = self.logs[(client, request_id)]
        while len(log.token_ids) < count:
            await self.next_outputs(client)
        return log

    async def wait_answer(self, call_id: int, *, client: int = 0) -> UtilityOutput:
        """Reads a client's messages until a call is answered."""
        while call_id not in self._answers:
            await self.next_outputs(client)
        return self._answers.pop(call_id)

    async def call_utility(self, method: str, *args: Any, client: int = 0) -> UtilityOutput:
        """``post_utility`` and ``wait_answer``."""
        call_id = await self.post_utility(method, *args, client=client)
        return await self.wait_answer(call_id, client=client)

    async def wait_dead(self, client: int = 0) -> None:
        """Reads a client's messages until ENGINE_CORE_DEAD."""
        try:
            while True:
                await self.next_outputs(client)
        except EngineDeadError:
            return

    async def check_silent(self, client: int = 0) -> None:
        """Asserts that nothing has come that was not read. Only after the engine's end."""
        await trio.lowlevel.checkpoint()
        try:
            frames = self._outputs[client].receive_nowait()
        except trio.WouldBlock:
            return
        raise AssertionError(f"there is more for client {client}: {frames!r}")
