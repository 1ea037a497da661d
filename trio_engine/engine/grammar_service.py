"""Requests that wait for their grammar: a few tasks compile for them, in order.

Engine. ``core.pending_grammars`` says who came and who ended; nothing here holds up the step loop
or a request without a grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from trio_engine.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.plan import RowGrammar
    from trio_engine.core.request import Request
    from trio_engine.sampling_params import StructuredOutputsParams

MAX_WORKERS = 4
"""Grammars under way at once. Nearly all take milliseconds, and only so many slow ones together
hold up others."""


class GrammarSource(Protocol):
    """What compiles: ``GuardedCompiler``, or a test's own."""

    @property
    def num_abandoned_threads(self) -> int:
        """Threads that compile for nobody any more."""
        ...

    async def compile(self, params: StructuredOutputsParams) -> RowGrammar:
        """Compiles a grammar; raises EngineError if there is none."""
        ...

    async def aclose(self) -> None:
        """Ends what it started."""
        ...


class GrammarService:
    """Has grammars compiled, each for one request.

    Args:
        compiler: does the work.
        nursery: of the tasks; its cancellation ends them.
        on_done: called with a request and either its grammar or why it has none.
    """

    def __init__(
        self,
        compiler: GrammarSource,
        nursery: trio.Nursery,
        on_done: Callable[[Request, RowGrammar | str], object],
    ) -> None:
        self._compiler = compiler
        self._nursery = nursery
        self._on_done = on_done
        self._waiting: dict[Request, None] = {}
        self._scopes: dict[Request, trio.CancelScope] = {}
        self._num_workers = 0
        nursery.start_soon(self._close_at_end, name="grammar compiler")

    def start(self, request: Request) -> None:
        """Takes a request. It hears by ``on_done``, unless it is cancelled before."""
        self._waiting[request] = None
        if self._num_workers < MAX_WORKERS:
            self._num_workers += 1
            self._nursery.start_soon(self._work, name="grammar worker")

    def cancel(self, request: Request) -> None:
        """Nobody wants this request's grammar any more."""
        self._waiting.pop(request, None)
        scope = self._scopes.get(request)
        if scope is not None:
            scope.cancel()

    async def _work(self) -> None:
        try:
            while self._waiting:
                request = next(iter(self._waiting))
                del self._waiting[request]
                await self._serve(request)
        finally:
            self._num_workers -= 1

    async def _serve(self, request: Request) -> None:
        params = request.sampling_params.structured_outputs
        assert params is not None
        with trio.CancelScope() as scope:
            self._scopes[request] = scope
            try:
                self._on_done(request, await self._compiler.compile(params))
            except EngineError as error:
                self._on_done(request, str(error))
            finally:
                del self._scopes[request]

    async def _close_at_end(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            await self._compiler.aclose()
