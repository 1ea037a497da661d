"""The engine process: nurseries, scopes and exits around one step loop.

Engine. How they nest, from the outside in (``docs/design/nurseries.md``):

    context      ZeroMQ; ended within the sockets' linger
      io         writers, shielded until their deadline; exit guard, asleep until armed
        work     signals, owner watch, readers, utility calls
          forward thread
            step loop

Leaving the work nursery is what joins readers and step loop; the writers outlive it, so that
the last words are sent whatever ended the work.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import trio

from trio_engine.core.engine_core import EngineCore
from trio_engine.engine import start_up
from trio_engine.engine.doorbell import ThreadSafeDoorbell
from trio_engine.engine.exit import ExitGuard, ExitStatus
from trio_engine.engine.forward_thread import open_forward_thread
from trio_engine.engine.grammar_service import GrammarService
from trio_engine.engine.guarded_compiler import GuardedCompiler
from trio_engine.engine.links import ClientLinks
from trio_engine.engine.shutdown import Shutdown, watch_owner, watch_signals
from trio_engine.engine.step_loop import StepLoop
from trio_engine.engine.utility import UtilityCalls, UtilityHandler
from trio_engine.errors import EngineDeadError, EngineError, EngineStartError
from trio_engine.observability.trace import Trace
from trio_engine.transport.context import open_context
from trio_engine.transport.ipc import remove_abandoned
from trio_engine.wire.handshake import EngineHandshake

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from trio_engine.config import EngineConfig
    from trio_engine.core.statistics import EngineCoreStatistics
    from trio_engine.engine.forward_thread import ForwardThread
    from trio_engine.engine.grammar_service import GrammarSource
    from trio_engine.executor.base import Executor, ExecutorFactory
    from trio_engine.transport.base import MessageContext

logger = logging.getLogger(__name__)

# With the owner gone there is nobody to flush for, and the promise is to be gone within 2 s.
OWNERLESS_GRACE_S = 0.5

ForwardOpener: TypeAlias = (
    "Callable[[Executor, Callable[[], object]], AbstractAsyncContextManager[ForwardThread]]"
)

NO_UTILITIES: Mapping[str, UtilityHandler] = MappingProxyType({})


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who an engine says it is.

    Attributes:
        engine_index: its data-parallel rank.
        local: the front end spawned this process.
        headless: started apart from any front end.
    """

    engine_index: int = 0
    local: bool = True
    headless: bool = False


class EngineCoreProc:
    """One engine behind sockets. ``run_engine_core`` is the short form for use in a nursery.

    Args:
        config: of the engine.
        executor_factory: makes its executor.
        handshake_address: where a front end is or will be bound.
        identity: what to say in the handshake.
        utilities: further utility methods by name, sync or async; see ``engine.utility``.
        owner_descriptor: read end of a pipe whose other end the owner holds; its end stops the
            engine at once.
        owns_process: handle SIGTERM and SIGINT, and end the process if a step never returns.
        open_transport: makes the owner of its sockets.
        open_forward: runs its executor; a test may do so without a thread.

    Attributes:
        shutdown: by which to ask it to stop.

    Counterpart: ``vllm/v1/engine/core.py`` ``EngineCoreProc``: there two daemon threads and
    three queues around a busy loop; ``docs/vllm-map.md`` sets them side by side.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor_factory: ExecutorFactory,
        *,
        handshake_address: str,
        identity: EngineIdentity | None = None,
        utilities: Mapping[str, UtilityHandler] = NO_UTILITIES,
        owner_descriptor: int | None = None,
        owns_process: bool = False,
        open_transport: Callable[[], MessageContext] = open_context,
        open_forward: ForwardOpener = open_forward_thread,
    ) -> None:
        identity = identity or EngineIdentity()
        self.shutdown = Shutdown()
        self._config = config
        self._executor_factory = executor_factory
        self._handshake_address = handshake_address
        self._handshake = EngineHandshake(
            identity.engine_index, local=identity.local, headless=identity.headless
        )
        self._engine_index = identity.engine_index
        self._utilities = utilities
        self._owner_descriptor = owner_descriptor
        self._owns_process = owns_process
        self._open_transport = open_transport
        self._open_forward = open_forward
        self._guard = ExitGuard(self._leave_process if owns_process else None)
        self._doorbell: ThreadSafeDoorbell
        self._context: MessageContext
        self._links: ClientLinks
        self._loop: StepLoop | None = None
        self._grammar_compiler: GrammarSource | None = None
        self._is_ready = False
        self._trace = Trace(config.trace)

    @property
    def core(self) -> EngineCore | None:
        """Its core, for tests to look into; None before the executor is loaded."""
        return None if self._loop is None else self._loop.core

    def statistics(self) -> EngineCoreStatistics | None:
        """The core's counts, and where the time of its steps went; None before the load's end."""
        return None if self._loop is None else self._loop.statistics()

    @property
    def has_abandoned_threads(self) -> bool:
        """Whether threads go on that nobody waits for; the interpreter may not end well then."""
        compiler = self._grammar_compiler
        return compiler is not None and compiler.num_abandoned_threads > 0

    async def run(
        self, task_status: trio.TaskStatus[EngineCoreProc] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Runs the engine until it is asked to stop. ``started`` means that READY was sent.

        Asked to stop before that it returns without ``started``, which ``nursery.start`` turns
        into a RuntimeError.

        Raises:
            EngineStartError: before READY; the message says why, the cause is attached.
            EngineDeadError: after READY; every client was told ENGINE_CORE_DEAD.

        Cancellation: as a stop with ``shutdown_timeout_s`` 0: every request gets ABORT, the
        running step is waited for, outboxes are flushed for at most ``flush_timeout_s``.
        """
        causes: list[BaseException] = []
        try:
            with ThreadSafeDoorbell() as self._doorbell:
                await self._run_transport(task_status)
        except* Exception as group:
            causes = _leaves(group)
            self._log_failures(causes)
        except* trio.Cancelled:
            if not causes:  # a failure must not hide behind a cancellation
                raise
        finally:
            self._trace.write()
        if causes:
            summary = str(causes[0]) or repr(causes[0])
            if self._is_ready:
                raise EngineDeadError(f"the engine died: {summary}") from causes[0]
            raise EngineStartError(summary) from causes[0]

    def _log_failures(self, causes: list[BaseException]) -> None:
        if not self._is_ready and len(causes) == 1 and isinstance(causes[0], EngineError):
            # Something that the user can mend (a model, an option, an address): the error that
            # leaves here says it in a line, and where our code was then helps nobody.
            return
        for cause in causes:
            logger.critical("engine_failed ready=%s", self._is_ready, exc_info=cause)

    def _make_grammar_compiler(self, vocab_size: int) -> GrammarSource:
        return GuardedCompiler(self._config, vocab_size)

    # The nurseries, from the outside in

    async def _run_transport(self, task_status: trio.TaskStatus[EngineCoreProc]) -> None:
        async with self._open_transport() as self._context:
            self._links = ClientLinks(
                self._context,
                self._handshake.identity,
                clock=time.monotonic,
                linger_s=self._config.flush_timeout_s,
            )
            await self._run_io(task_status)

    async def _run_io(self, task_status: trio.TaskStatus[EngineCoreProc]) -> None:
        async with trio.open_nursery() as io:
            io.start_soon(self._guard.run, name="exit guard")
            failed = False
            try:
                await self._run_work(io, task_status)
            except BaseException as error:
                # What crashed out here, a writer, shows as the cancellation of this nursery.
                crashed = any(isinstance(leaf, Exception) for leaf in _leaves(error))
                failed = crashed or io.cancel_scope.cancel_called
                raise
            finally:
                # Synchronous: whatever ended the work, cancellation included, this is done.
                try:
                    self._say_last_words(failed=failed)
                finally:
                    self._guard.disarm()

    async def _run_work(
        self, io: trio.Nursery, task_status: trio.TaskStatus[EngineCoreProc]
    ) -> None:
        async with trio.open_nursery() as work:
            if self._owns_process:
                await work.start(watch_signals, self.shutdown)
            if self._owner_descriptor is not None:
                work.start_soon(self._watch_owner, self._owner_descriptor)
            with trio.CancelScope() as until_stop:
                work.start_soon(self._stop_start_up, until_stop)
                await self._run_forward(io, work, task_status)
            work.cancel_scope.cancel()

    async def _run_forward(
        self,
        io: trio.Nursery,
        work: trio.Nursery,
        task_status: trio.TaskStatus[EngineCoreProc],
    ) -> None:
        handshake_socket = await start_up.greet(
            self._context,
            self._handshake,
            self._handshake_address,
            self._config.handshake_timeout_s,
        )
        executor = self._executor_factory(self._config)
        async with self._open_forward(executor, self._doorbell.ring) as forward:
            try:
                loop = await self._open_links(io, work, forward)
                await handshake_socket.send([self._handshake.ready()])
                await handshake_socket.aclose()
                self._is_ready = True
                logger.info("engine_ready address=%s", self._handshake_address)
                if self._owns_process:
                    # The loaded heap lives as long as the engine: never walk it again.
                    gc.collect()
                    gc.freeze()
                task_status.started(self)
                await self._run_steps(work, loop)
            finally:
                self._arm_guard(forward)

    async def _open_links(
        self, io: trio.Nursery, work: trio.Nursery, forward: ForwardThread
    ) -> StepLoop:
        properties = await start_up.wait_loaded(forward, self._doorbell)
        addresses = self._handshake.addresses
        assert addresses is not None
        core = EngineCore(
            self._config,
            properties,
            num_clients=len(addresses.inputs),
            clock=time.monotonic,
            engine_index=self._engine_index,
        )
        loop = self._loop = StepLoop(
            core,
            forward,
            pipeline_depth=self._config.pipeline_depth,
            doorbell=self._doorbell,
            on_output=self._links.flush,
        )
        self._trace.attach(loop.phases)
        loop.start_utility_call = UtilityCalls(loop, work, self._utilities).start
        self._grammar_compiler = self._make_grammar_compiler(properties.vocab_size)
        loop.grammars = GrammarService(self._grammar_compiler, work, loop.put_grammar)
        description = start_up.describe(properties, core.max_model_len, addresses)
        announcement = self._handshake.ready_response(description)
        await self._links.open(addresses, loop, announcement, readers=work, writers=io)
        if addresses.coordinator_input is not None:
            await start_up.wait_coordinator(self._context, addresses.coordinator_input)
        return loop

    async def _watch_owner(self, descriptor: int) -> None:
        await watch_owner(self.shutdown, descriptor)
        self._guard.shorten(OWNERLESS_GRACE_S)

    async def _stop_start_up(self, until_stop: trio.CancelScope) -> None:
        """Before READY a request to stop ends everything; later it is ``_drain_when_asked``'s."""
        await self.shutdown.requested.wait()
        if not self._is_ready:
            until_stop.cancel()

    async def _run_steps(self, work: trio.Nursery, loop: StepLoop) -> None:
        with trio.CancelScope() as steps:
            work.start_soon(self._drain_when_asked, loop, steps)
            await loop.run()
        # Told now, while the step that still runs is waited for.
        work.start_soon(loop.refuse_all)

    async def _drain_when_asked(self, loop: StepLoop, steps: trio.CancelScope) -> None:
        await self.shutdown.requested.wait()
        loop.start_draining()
        steps.deadline = trio.current_time() + self._config.shutdown_timeout_s
        await self.shutdown.abort_requested.wait()
        steps.cancel()

    # The ways out

    def _arm_guard(self, forward: ForwardThread) -> None:
        """From here on the forward thread has only so long to return."""
        grace_s = self._config.exit_grace_s
        if self.shutdown.owner_is_gone:
            grace_s = min(grace_s, OWNERLESS_GRACE_S)
        if forward.is_loading:
            grace_s = 0.0  # it may take minutes, and there is nobody to tell anything
        asked = self.shutdown.requested.is_set()
        self._guard.arm(grace_s, ExitStatus.STOPPED if asked else self._failure_status)

    @property
    def _failure_status(self) -> ExitStatus:
        return ExitStatus.CRASHED if self._is_ready else ExitStatus.START_UP_FAILED

    def _say_last_words(self, *, failed: bool) -> None:
        try:
            if self._loop is not None and not failed:
                self._loop.abort_all()
            elif self._loop is not None and self._is_ready:
                for outbox in self._loop.core.outboxes:
                    outbox.mark_dead()
        finally:
            if self.shutdown.owner_is_gone:
                remove_abandoned(self._handshake_address)
            # Without an owner nobody reads it; before READY nobody waits for more.
            if self.shutdown.owner_is_gone or not self._is_ready:
                self._context.drop_linger()
                self._links.close(0.0)
            else:
                self._links.close(self._config.flush_timeout_s)

    async def _leave_process(self, status: ExitStatus) -> None:
        """The exit guard's last act: the forward thread holds the work nursery and will not go."""
        try:
            self._say_last_words(failed=status is ExitStatus.CRASHED)
            await self._links.wait_flushed()
            await self._context.aclose()
        except Exception:
            logger.exception("last_words_failed")  # and go: nothing else would end the process
        self._trace.write()
        logging.shutdown()
        os._exit(status)


async def run_engine_core(
    config: EngineConfig,
    *,
    executor_factory: ExecutorFactory,
    handshake_address: str,
    identity: EngineIdentity | None = None,
    utilities: Mapping[str, UtilityHandler] = NO_UTILITIES,
    task_status: trio.TaskStatus[EngineCoreProc] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs an engine in this process: ``proc = await nursery.start(run_engine_core, ...)``.

    Raises and is cancelled as ``EngineCoreProc.run``; a step that never returns holds up the
    caller's nursery, as only the end of the process could help.
    """
    proc = EngineCoreProc(
        config,
        executor_factory,
        handshake_address=handshake_address,
        identity=identity,
        utilities=utilities,
    )
    await proc.run(task_status)


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of any depth; a lone one is its own only leaf."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
