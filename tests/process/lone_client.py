"""One of several clients of an engine, that can go away and come back."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from trio_engine.testing.requests import make_request
from trio_engine.transport.context import open_context
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import OutputsDecoder, RequestEncoder
from trio_engine.wire.handshake import engine_identity

if TYPE_CHECKING:
    from trio_engine.outputs import EngineCoreOutput
    from trio_engine.transport.socket import ZmqSocket
    from trio_engine.wire.messages import EngineZmqAddresses

PROMPT = [1, 2, 3]


class LoneClient:
    """Its two sockets, in a context of their own; entering it again is how it comes back.

    Args:
        folder: for its endpoints.
        index: which of the engine's clients it is.
    """

    def __init__(self, folder: str, index: int) -> None:
        self.index = index
        self._input_address = f"ipc://{folder}/lone-in"
        self._output_address = f"ipc://{folder}/lone-out"
        self._encoder = RequestEncoder()
        self._decoder = OutputsDecoder()
        self._stack = AsyncExitStack()
        self._input: ZmqSocket
        self._output: ZmqSocket

    def join(self, addresses: EngineZmqAddresses) -> None:
        """Has INIT name it."""
        addresses.inputs.append(self._input_address)
        addresses.outputs.append(self._output_address)

    async def __aenter__(self) -> Self:
        context = await self._stack.enter_async_context(open_context())
        self._input = context.socket(SocketKind.ROUTER, linger_s=0.5)
        self._input.bind(self._input_address)
        self._output = context.socket(SocketKind.PULL)
        self._output.bind(self._output_address)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Goes without a word. When this returns nothing of it is left, so it can come back."""
        await self._stack.aclose()

    async def wait_announced(self) -> None:
        """Returns when the engine has spoken, and so can be spoken to."""
        await self._input.receive()

    async def add(self, request_id: str, **params: Any) -> None:
        request = make_request(request_id, PROMPT, client=self.index, **params)
        await self._input.send([engine_identity(0), *self._encoder.encode(request)])

    async def receive(self) -> list[EngineCoreOutput]:
        """The outputs in the next message."""
        return self._decoder.decode(await self._output.receive()).outputs
