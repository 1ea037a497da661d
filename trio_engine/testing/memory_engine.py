"""A whole engine without threads and sockets: the real ``EngineCoreProc`` and its clients' ends.

Public kit. Start-up, nurseries, readers, writers, step loop, utility calls and the ways out are the
engine's own. Only sockets are in memory (``memory_transport``), and plans run when told
(``inline_forward``), so that a mock clock can be used.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trio_engine.engine.engine_core_proc import EngineCoreProc
from trio_engine.testing.inline_forward import open_inline_forward
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

HANDSHAKE = "memory://handshake"


class MemoryEngine:
    """An engine whose front end has said INIT already. Make it inside Trio, then ``run`` it.

    Args:
        config: of the engine.
        executor: runs its plans, one move for each ``forward.serve``.
        num_clients: API servers.

    Attributes:
        proc: the engine.
        forward: runs plans; there once the engine runs.
        inputs: by client, where to send to the engine.
        outputs: by client, what came from it. One message that was not taken holds up the next,
            as full sockets do.
    """

    def __init__(self, config: EngineConfig, executor: Executor, *, num_clients: int) -> None:
        self.forward: ForwardThread
        network = MemoryNetwork()
        addresses = EngineZmqAddresses(
            inputs=[f"memory://in{index}" for index in range(num_clients)],
            outputs=[f"memory://out{index}" for index in range(num_clients)],
        )
        self.inputs: list[MemoryPeer] = [network.peer(address) for address in addresses.inputs]
        self.outputs = [network.peer(address, room=1) for address in addresses.outputs]
        network.peer(HANDSHAKE).send([encode_control(Init(addresses=addresses))])
        self.proc = EngineCoreProc(
            config,
            lambda _: executor,
            handshake_address=HANDSHAKE,
            open_transport=lambda: network,
            open_forward=self._open_forward,
        )

    @property
    def core(self) -> EngineCore:
        """Its core, once it has started up."""
        assert self.proc.core is not None, "not started"
        return self.proc.core

    async def run(self) -> None:
        """As ``EngineCoreProc.run``, also when cancelled."""
        await self.proc.run()

    @asynccontextmanager
    async def _open_forward(
        self, executor: Executor, on_event: Callable[[], object]
    ) -> AsyncGenerator[ForwardThread]:
        async with open_inline_forward(executor, on_event) as self.forward:
            yield self.forward
