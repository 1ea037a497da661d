"""A whole engine without threads and sockets: the real ``EngineCoreProc`` and its clients' ends.

Public kit. Start-up, nurseries, readers, writers, step loop, utility calls and the ways out are the
engine's own. Only sockets are in memory (``memory_transport``), and plans run when told
(``inline_forward``), so that a mock clock can be used.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from trio_engine.engine.engine_core_proc import EngineCoreProc
from trio_engine.testing.inline_forward import InlineForward, open_inline_forward
from trio_engine.testing.memory_transport import MemoryNetwork
from trio_engine.wire.codec import encode_control
from trio_engine.wire.messages import EngineZmqAddresses, Init

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from trio_engine.config import EngineConfig
    from trio_engine.core.engine_core import EngineCore
    from trio_engine.engine.forward_thread import ForwardThread
    from trio_engine.executor.base import Executor
    from trio_engine.testing.memory_transport import MemoryPeer
    from trio_engine.transport.context import ZmqContext

HANDSHAKE = "memory://handshake"


class MemoryEngine(EngineCoreProc):
    """An engine whose front end has said INIT already. Make it inside Trio, then ``run`` it.

    Args:
        config: of the engine.
        executor: runs its plans, one move for each ``forward.work``.
        num_clients: API servers.

    Attributes:
        forward: runs plans.
        inputs: by client, where to send to the engine.
        outputs: by client, what came from it. One message that was not taken holds up the next,
            as full sockets do.
    """

    forward: InlineForward
    inputs: list[MemoryPeer]
    outputs: list[MemoryPeer]

    def __init__(self, config: EngineConfig, executor: Executor, *, num_clients: int) -> None:
        super().__init__(config, lambda _: executor, handshake_address=HANDSHAKE)
        self._network = MemoryNetwork()
        addresses = EngineZmqAddresses(
            inputs=[f"memory://in{index}" for index in range(num_clients)],
            outputs=[f"memory://out{index}" for index in range(num_clients)],
        )
        self.inputs = [self._network.peer(address) for address in addresses.inputs]
        self.outputs = [self._network.peer(address, room=1) for address in addresses.outputs]
        self._network.peer(HANDSHAKE).send([encode_control(Init(addresses=addresses))])

    @property
    def core(self) -> EngineCore:
        """Its core, once it has started up."""
        assert self._loop is not None, "not started"
        return self._loop.core

    def _open_context(self) -> ZmqContext:
        return cast("ZmqContext", self._network)

    @asynccontextmanager
    async def _open_forward(
        self, executor: Executor, on_event: Callable[[], object]
    ) -> AsyncGenerator[ForwardThread]:
        async with open_inline_forward(executor, on_event) as self.forward:
            yield self.forward
