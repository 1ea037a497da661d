"""An engine in this process behind the same face: no sockets, no second interpreter.

For tests and tools. Its steps compete with the caller's tasks for the interpreter, a step that
never returns holds up the end of the block, and what kills the engine's library kills its caller.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trio_engine.client.async_client import CLIENT_INDEX, AsyncEngineClient
from trio_engine.client.sender import MessageSender
from trio_engine.client.service_tasks import open_service_tasks
from trio_engine.core.engine_core import EngineCore
from trio_engine.engine import start_up
from trio_engine.engine.doorbell import Doorbell, ThreadSafeDoorbell
from trio_engine.engine.forward_thread import open_forward_thread
from trio_engine.engine.grammar_service import GrammarService
from trio_engine.engine.guarded_compiler import GuardedCompiler
from trio_engine.engine.inbox import Arrival
from trio_engine.engine.step_loop import StepLoop
from trio_engine.engine.utility import UtilityCalls
from trio_engine.errors import EngineDeadError, EngineStartError
from trio_engine.observability.trace import Trace
from trio_engine.text.processor import TextProcessor
from trio_engine.wire.codec import RequestDecoder, UndecodableRequest
from trio_engine.wire.messages import EngineZmqAddresses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from trio_engine.client.base import EngineClient
    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import ExecutorProperties
    from trio_engine.engine.forward_thread import ForwardThread
    from trio_engine.engine.inbox import Inbox
    from trio_engine.executor.base import Executor, ExecutorFactory
    from trio_engine.text.tokenizer import Tokenizer
    from trio_engine.wire.messages import EngineCoreMessage, Frames

    OpenForward = Callable[
        [Executor, Callable[[], object]], AbstractAsyncContextManager[ForwardThread]
    ]

ENGINE_INDEX = 0


class _InboxSender(MessageSender):
    """Puts messages where an engine's readers do.

    They are encoded and decoded all the same: the engine then sees exactly what it would see of
    a client elsewhere, and nothing that the caller can still change.
    """

    def __init__(self, inbox: Inbox) -> None:
        super().__init__([ENGINE_INDEX])
        self._inbox = inbox
        self._decoder = RequestDecoder()

    async def _send(self, engine_index: int, frames: Frames) -> None:
        await self._inbox.put([Arrival(CLIENT_INDEX, self._decode(frames))])

    def _decode(self, frames: Frames) -> EngineCoreMessage | UndecodableRequest:
        try:
            return self._decoder.decode(frames)
        except UndecodableRequest as error:
            return error


class _InprocEngine:
    """One engine as a task of the block's; alive from ``run`` until its cancellation."""

    def __init__(
        self, config: EngineConfig, executor_factory: ExecutorFactory, open_forward: OpenForward
    ) -> None:
        self.client: AsyncEngineClient | None = None
        self.loop: StepLoop
        self.properties: ExecutorProperties
        self._config = config
        self._executor_factory = executor_factory
        self._open_forward = open_forward
        self._output_bell = Doorbell()
        self._loaded = trio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Loads and serves. Whatever ends it ends up in its client, or in ``wait_loaded``."""
        try:
            executor = self._executor_factory(self._config)
            with ThreadSafeDoorbell() as doorbell:
                async with self._open_forward(executor, doorbell.ring) as forward:
                    await self._serve(forward, doorbell)
        except* Exception as group:  # the nurseries between here and the fault
            self._failure = _first(group)
        finally:
            self._loaded.set()
        if self._failure is not None and self.client is not None:
            await self.client.notice_death(str(self._failure), self._failure)

    async def wait_loaded(self) -> None:
        """Waits until ``loop`` and ``properties`` are there.

        Raises:
            EngineStartError: the executor did not load; the cause is attached.
        """
        await self._loaded.wait()
        if self._failure is not None:
            raise EngineStartError(str(self._failure)) from self._failure

    async def pump_outputs(self, client: AsyncEngineClient) -> None:
        """Hands outputs to the client, after each turn of the step loop that had some."""
        self.client = client
        (outbox,) = self.loop.core.outboxes
        while True:
            await self._output_bell.wait()
            for message in outbox.take(trio.current_time()):
                client.apply(message)

    async def _serve(self, forward: ForwardThread, doorbell: ThreadSafeDoorbell) -> None:
        self.properties = await start_up.wait_loaded(forward, doorbell)
        core = EngineCore(self._config, self.properties, num_clients=1, clock=trio.current_time)
        self.loop = StepLoop(
            core,
            forward,
            pipeline_depth=self._config.pipeline_depth,
            doorbell=doorbell,
            on_output=lambda _: self._output_bell.ring(),
        )
        trace = Trace(self._config.trace)
        trace.attach(self.loop.phases)
        try:
            await self._run_loop()
        finally:
            trace.write()

    async def _run_loop(self) -> None:
        async with trio.open_nursery() as nursery:
            self.loop.start_utility_call = UtilityCalls(self.loop, nursery, {}).start
            compiler = GuardedCompiler(self._config, self.properties.vocab_size)
            self.loop.grammars = GrammarService(compiler, nursery, self.loop.put_grammar)
            self._loaded.set()
            await self.loop.run()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_inproc_engine(
    config: EngineConfig,
    executor_factory: ExecutorFactory,
    *,
    tokenizer: Tokenizer | None = None,
    max_in_flight: int | None = None,
    open_forward: OpenForward = open_forward_thread,
) -> AsyncIterator[EngineClient]:
    """Runs an engine on tasks of this run and one thread, for as long as the block.

    As with ``open_engine``, an error of the body leaves as it was raised and a dead engine does
    not cancel it.

    Args:
        config: limits of the engine.
        executor_factory: makes its executor.
        tokenizer: of its model, else prompts are token ids and outputs have no text.
        max_in_flight: requests that may be open at once; beyond it ``OverloadedError``.
        open_forward: runs the executor; the testing kit has others that need no thread.

    Raises:
        EngineStartError: the executor did not load.

    Cancellation: leaving waits for the step that runs, or for the load.
    """
    async with open_service_tasks() as tasks:
        engine = _InprocEngine(config, executor_factory, open_forward)
        tasks.start_soon(engine.run)
        await engine.wait_loaded()
        max_model_len = engine.loop.core.max_model_len
        no_addresses = EngineZmqAddresses(inputs=[], outputs=[])
        client = AsyncEngineClient(
            _InboxSender(engine.loop.inbox),
            {ENGINE_INDEX: start_up.describe(engine.properties, max_model_len, no_addresses)},
            TextProcessor(
                tokenizer, max_model_len=max_model_len, vocab_size=engine.properties.vocab_size
            ),
            max_in_flight=max_in_flight,
            explain_death=_explain,
        )
        tasks.start_soon(client.run_sender)
        tasks.start_soon(engine.pump_outputs, client)
        try:
            yield client
        finally:
            await client.aclose()


async def _explain(noticed: str) -> EngineDeadError:
    return EngineDeadError(f"the engine died: {noticed}")


def _first(error: BaseException) -> Exception:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
