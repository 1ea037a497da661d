"""An engine that a test plays by hand: real sockets and the real protocol, no core behind them.

Public kit. Imports neither torch nor pytest, and zmq only when an engine is opened.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from trio_engine.client.service_tasks import open_service_tasks
from trio_engine.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    UtilityOutput,
    UtilityResult,
)
from trio_engine.requests import EngineCoreRequest
from trio_engine.wire.codec import OutputsEncoder, RequestDecoder
from trio_engine.wire.handshake import EngineHandshake
from trio_engine.wire.messages import (
    ENGINE_CORE_DEAD,
    AbortRequest,
    EngineCoreMessage,
    ReadyResponse,
    UtilityCall,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trio_engine.transport.context import ZmqContext
    from trio_engine.transport.socket import ZmqSocket

SCRIPTED_READY = ReadyResponse(
    max_model_len=1024,
    num_gpu_blocks=64,
    block_size=16,
    dp_stats_address=None,
    dtype="float32",
    vllm_version="0.25.1",
    world_size=1,
    data_parallel_size=1,
)
"""What a scripted engine announces unless told otherwise."""


class ScriptedWireEngine:
    """The engine's end of the wire. Made by ``open_scripted_engine``.

    It reads by itself and answers nothing by itself: a test takes messages with ``receive`` and
    answers with ``send_tokens``, ``answer`` or, for what no engine should say, ``send_frames``.
    Serves one client, the first address of INIT.

    Attributes:
        received: every message so far, oldest first, taken or not.
    """

    def __init__(self, context: ZmqContext, handshake: EngineHandshake) -> None:
        self.received: list[EngineCoreMessage] = []
        self._context = context
        self._handshake = handshake
        self._encoder = OutputsEncoder()
        self._num_taken = 0
        self._arrivals = trio.lowlevel.ParkingLot()
        self._may_read = trio.Event()
        self._may_read.set()
        self._ready = trio.Event()
        self._sending = trio.Lock()
        self._input: ZmqSocket | None = None
        self._output: ZmqSocket | None = None

    @property
    def added_ids(self) -> list[str]:
        """Internal ids of the requests that have arrived, in order."""
        return [m.request_id for m in self.received if isinstance(m, EngineCoreRequest)]

    @property
    def aborted_ids(self) -> list[str]:
        """Internal ids of the ABORTs that have arrived, in order, repeated ones included."""
        return [
            request_id
            for message in self.received
            if isinstance(message, AbortRequest)
            for request_id in message.request_ids
        ]

    async def wait_ready(self) -> None:
        """Waits until READY was said and ``send`` may be used."""
        await self._ready.wait()

    async def wait_num_received(self, count: int) -> None:
        """Waits until ``count`` messages have arrived, taken or not."""
        await trio.lowlevel.checkpoint()
        while len(self.received) < count:
            await self._arrivals.park()

    async def receive(self) -> EngineCoreMessage:
        """The oldest message not taken yet. Cancellation: none is lost."""
        await trio.lowlevel.checkpoint()
        while self._num_taken == len(self.received):
            await self._arrivals.park()
        self._num_taken += 1
        return self.received[self._num_taken - 1]

    async def receive_add(self) -> EngineCoreRequest:
        """The next ADD; messages of other kinds before it are skipped."""
        while True:
            message = await self.receive()
            if isinstance(message, EngineCoreRequest):
                return message

    async def receive_abort(self) -> list[str]:
        """The ids of the next ABORT; messages of other kinds before it are skipped."""
        while True:
            message = await self.receive()
            if isinstance(message, AbortRequest):
                return message.request_ids

    async def receive_utility(self) -> UtilityCall:
        """The next utility call; messages of other kinds before it are skipped."""
        while True:
            message = await self.receive()
            if isinstance(message, UtilityCall):
                return message

    def pause_reading(self) -> None:
        """Leaves what comes from now on in ZeroMQ, as an engine does that is busy or stuck.

        One message may still come through: the one that the reader waits for.
        """
        self._may_read = trio.Event()

    def resume_reading(self) -> None:
        """Reads on."""
        self._may_read.set()

    async def send(self, outputs: EngineCoreOutputs) -> None:
        """Sends one message; its timestamp is filled in if it has none."""
        outputs.timestamp = outputs.timestamp or trio.current_time()
        await self.send_frames(self._encoder.encode(outputs))

    async def send_tokens(
        self,
        request_id: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Sends tokens, an end, or both for one request."""
        entry = EngineCoreOutput(
            request_id,
            list(token_ids),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        finished = None if finish_reason is None else {request_id}
        await self.send(EngineCoreOutputs(outputs=[entry], finished_requests=finished))

    async def answer(self, call: UtilityCall, value: Any) -> None:
        """Answers a utility call."""
        output = UtilityOutput(call.call_id, result=UtilityResult(None, value))
        await self.send(EngineCoreOutputs(utility_output=output))

    async def refuse(self, call: UtilityCall, failure_message: str) -> None:
        """Answers a utility call by a failure."""
        output = UtilityOutput(call.call_id, failure_message)
        await self.send(EngineCoreOutputs(utility_output=output))

    async def send_dead(self) -> None:
        """Says that a fatal error has happened."""
        await self.send_frames([ENGINE_CORE_DEAD])

    async def send_frames(self, frames: Sequence[bytes | memoryview]) -> None:
        """Sends any bytes at all. Several tasks may send; each message goes out whole."""
        await self._ready.wait()
        assert self._output is not None
        async with self._sending:
            await self._output.send(frames)

    async def run(self, handshake_address: str, ready_response: ReadyResponse) -> None:
        """Starts up, then reads until it is cancelled. Run by ``open_scripted_engine``."""
        await self._start_up(handshake_address, ready_response)
        assert self._input is not None
        decoder = RequestDecoder()
        while True:
            await self._may_read.wait()
            self.received.append(decoder.decode(await self._input.receive()))
            self._arrivals.unpark_all()

    async def _start_up(self, handshake_address: str, ready_response: ReadyResponse) -> None:
        from trio_engine.transport.socket import SocketKind

        identity = self._handshake.identity
        socket = self._context.socket(SocketKind.DEALER, identity=identity)
        socket.connect(handshake_address)
        await socket.send([self._handshake.hello()])
        addresses = self._handshake.receive_init(await socket.receive())
        self._input = self._context.socket(SocketKind.DEALER, identity=identity)
        self._input.connect(addresses.inputs[0])
        self._output = self._context.socket(SocketKind.PUSH)
        self._output.connect(addresses.outputs[0])
        await self._input.send([self._handshake.ready_response(ready_response)])
        await socket.send([self._handshake.ready()])
        self._ready.set()


@asynccontextmanager
async def open_scripted_engine(
    handshake_address: str,
    *,
    engine_index: int = 0,
    local: bool = False,
    headless: bool = True,
    ready_response: ReadyResponse = SCRIPTED_READY,
) -> AsyncIterator[ScriptedWireEngine]:
    """Opens an engine that connects to a front end, now or when that starts to listen.

    Args:
        handshake_address: the front end's.
        engine_index: rank, and with it the routing identity.
        local: whether it says that its front end spawned it.
        headless: whether it says that it was started apart from a front end.
        ready_response: what it announces.

    Example::

        async with open_scripted_engine(address) as wire, connect_engine(address) as engine:
            async with engine.generate([1, 2, 3]) as stream:
                request = await wire.receive_add()
                await wire.send_tokens(request.request_id, [7], FinishReason.LENGTH)

    Cancellation: leaving closes its sockets as a process that dies does, without a word.
    """
    from trio_engine.transport.context import open_context

    async with open_context() as context, open_service_tasks() as tasks:
        handshake = EngineHandshake(engine_index, local=local, headless=headless)
        engine = ScriptedWireEngine(context, handshake)
        tasks.start_soon(engine.run, handshake_address, ready_response)
        yield engine
