"""A client and an engine in the test's own run, with real sockets between them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import msgspec
import trio

from tests.tasks.engine_parts import CONFIG, PROMPT, check_nothing_held, null_tokens
from trio_engine.client.front_end import open_front_end
from trio_engine.client.service_tasks import open_service_tasks
from trio_engine.client.wire_client import open_wire_client
from trio_engine.engine.engine_core_proc import EngineCoreProc, EngineIdentity
from trio_engine.errors import EngineDeadError
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.testing.scripted_executor import ScriptedExecutor
from trio_engine.text.processor import TextProcessor
from trio_engine.wire.codec import RequestDecoder
from trio_engine.wire.handshake import ExpectedEngine
from trio_engine.wire.messages import AbortRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.client.async_client import AsyncEngineClient
    from trio_engine.config import EngineConfig
    from trio_engine.executor.base import Executor
    from trio_engine.transport.socket import ZmqSocket
    from trio_engine.wire.messages import Frames

TEST_TIMEOUT_S = 60.0
"""No test waits for time to pass; this ends one that would hang."""

LONG_CONFIG = msgspec.structs.replace(
    CONFIG, max_model_len=16_384, block_size=16, num_blocks=2048, max_num_seqs=256
)
ENDLESS = SamplingParams(
    temperature=0.0,
    max_tokens=10_000,
    ignore_eos=True,
    output_kind=RequestOutputKind.DELTA,
)


class SendGate:
    """In the place of a client's input socket: each message waits until the test lets it go.

    Attributes:
        added_ids: of the requests that have gone, in order.
        aborted_ids: of their ABORTs, in order.
    """

    def __init__(self) -> None:
        self.added_ids: list[str] = []
        self.aborted_ids: list[str] = []
        self._socket: ZmqSocket
        self._decoder = RequestDecoder()
        self._is_open = False
        self._lot = trio.lowlevel.ParkingLot()

    def put_before(self, socket: ZmqSocket) -> ZmqSocket:
        self._socket = socket
        return cast("ZmqSocket", self)

    async def send(self, frames: Frames) -> None:
        if not self._is_open:
            await self._lot.park()
        message = self._decoder.decode(frames[1:])
        if isinstance(message, EngineCoreRequest):
            self.added_ids.append(message.request_id)
        elif isinstance(message, AbortRequest):
            assert set(message.request_ids) <= set(self.added_ids), "an ABORT before its ADD"
            self.aborted_ids += message.request_ids
        await self._socket.send(frames)

    def let_pass(self) -> None:
        """The message that waits, if there is one."""
        self._lot.unpark()

    def open(self) -> None:
        """All messages from now on."""
        self._is_open = True
        self._lot.unpark()

    def close(self) -> None:
        """None from now on."""
        self._is_open = False


@asynccontextmanager
async def open_client_and_engine(
    executor: Executor,
    *,
    config: EngineConfig = CONFIG,
    gate: SendGate | None = None,
    timeout_s: float = TEST_TIMEOUT_S,
) -> AsyncIterator[tuple[AsyncEngineClient, EngineCoreProc]]:
    """A client in front of an engine that has said READY; the end of the block ends both.

    That the engine dies shows to the client alone.
    """
    with trio.fail_after(timeout_s):
        async with (
            trio.open_nursery() as nursery,
            open_front_end("tcp://127.0.0.1:0") as front_end,
            open_service_tasks() as tasks,
        ):
            proc = EngineCoreProc(
                config,
                lambda _: executor,
                handshake_address=front_end.handshake_address,
                identity=EngineIdentity(local=False, headless=True),
            )
            nursery.start_soon(_run, proc)
            engines = await front_end.wait_engines_ready([ExpectedEngine(0, local=False)])
            if gate is not None:
                front_end.input = gate.put_before(front_end.input)
            async with open_wire_client(
                front_end,
                engines,
                TextProcessor(None, max_model_len=config.max_model_len or 1),
                max_in_flight=None,
                explain_death=_explain,
                tasks=tasks,
            ) as client:
                try:
                    yield client, proc
                finally:
                    if isinstance(executor, ScriptedExecutor):
                        for executor_gate in executor.gates.values():
                            executor_gate.open()
            nursery.cancel_scope.cancel()


async def check_nothing_left(client: AsyncEngineClient, proc: EngineCoreProc) -> None:
    """Neither side holds anything of earlier requests, and the engine serves the next one."""
    await client.call_utility("is_sleeping")  # goes behind all aborts
    check_nothing_held(proc)
    statistics = client.statistics()
    assert statistics.num_requests == statistics.num_unsent == statistics.num_utility_calls == 0
    output = await client.complete(PROMPT, SamplingParams(temperature=0.0, max_tokens=4))
    assert output.token_ids == null_tokens(4)
    check_nothing_held(proc)


async def _run(proc: EngineCoreProc) -> None:
    try:
        await proc.run()
    except EngineDeadError:
        return


async def _explain(noticed: str) -> EngineDeadError:
    return EngineDeadError(f"the engine died: {noticed}")
