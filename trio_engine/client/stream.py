"""One request as the caller sees it: a block to be in, and an iterator inside it.

A class and not an async generator: a generator's clean-up runs cancelled, or in a garbage
collector's pass, where no abort could be promised.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Protocol, Self

import trio

from trio_engine.errors import EngineClosedError

if TYPE_CHECKING:
    from types import TracebackType

    from trio_engine.client.outputs import RequestOutput
    from trio_engine.client.parent_request import ParentRequest
    from trio_engine.client.request import RequestSpec


_OUTSIDE_ITS_BLOCK = (
    "a RequestStream is iterated inside its block:"
    " 'async with engine.generate(...) as stream: async for delta in stream: ...'"
)


class StreamHost(Protocol):
    """What a stream needs of its client."""

    async def _open_request(self, spec: RequestSpec) -> ParentRequest:
        """Checks and sends a request. Nothing is left of it if this raises."""
        ...

    def _close_request(self, request: ParentRequest) -> None:
        """Aborts what has not ended of a request. Never waits."""
        ...


class RequestStream:
    """The outputs of one request. Made by ``EngineClient.generate``.

    Entering the block sends the request; leaving it, in whatever way, aborts it unless it has
    ended. The iterator ends after the item with a finish reason, of each answer where
    ``SamplingParams.n`` asks for several; their items come as they are ready, told apart by
    ``index``.

    Example::

        async with engine.generate(prompt, params) as stream:
            async for delta in stream:
                print(delta.text, end="")

    Raises:
        RequestError: on entering; the request can never be served.
        OverloadedError: on entering; the client holds ``max_in_flight`` requests.
        RequestFailedError: while iterating; the engine ended the request with ERROR.
        EngineDeadError: on entering or while iterating.
        EngineClosedError: likewise, after the client was closed.

    Cancellation: entering sends the whole request or nothing. Waiting for an item loses none.
    Leaving is not a checkpoint: the abort is the client's before anything can interrupt it.
    """

    def __init__(self, host: StreamHost, spec: RequestSpec) -> None:
        self._host = host
        self._spec = spec
        self._request: ParentRequest | None = None
        self._was_entered = False
        self._was_left = False
        # For ``__del__``, which may run on any thread.
        self._trio_token: trio.lowlevel.TrioToken | None = None

    @property
    def request_id(self) -> str:
        """The caller's id, or the one made up for it: what ``EngineClient.abort`` takes."""
        return self._spec.request_id

    # KeyboardInterrupt is held off in both: between registering and noting the request it
    # would leave one that nobody aborts, and at the top of the exit it would skip the abort.
    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Self:
        if self._was_entered:
            raise RuntimeError("a RequestStream can be entered once; call generate() again")
        self._was_entered = True
        self._trio_token = trio.lowlevel.current_trio_token()
        self._request = await self._host._open_request(self._spec)
        return self

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._was_left = True
        if self._request is not None:
            self._host._close_request(self._request)

    def __aiter__(self) -> Self:
        if self._request is None:
            raise TypeError(_OUTSIDE_ITS_BLOCK)
        return self

    async def __anext__(self) -> RequestOutput:
        """The next item, as soon as ``output_kind`` has one; a checkpoint in any case."""
        if self._request is None:
            raise TypeError(_OUTSIDE_ITS_BLOCK)
        if self._was_left:
            raise EngineClosedError(f"the stream of request {self.request_id!r} was left")
        reader = self._request.reader
        if reader.is_exhausted:
            await trio.lowlevel.checkpoint()
            raise StopAsyncIteration
        return await reader.receive()

    def __del__(self) -> None:
        # Only for blocks that were entered by hand and then forgotten, or whose entry a
        # KeyboardInterrupt cut off from its exit.
        if self._request is None or self._was_left or self._request.reader.is_ended:
            return
        warnings.warn(
            f"request {self.request_id!r} was dropped without leaving its stream's block",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )
        if self._trio_token is not None:
            # After the run there is no client that could abort anything.
            with contextlib.suppress(trio.RunFinishedError):
                self._trio_token.run_sync_soon(self._host._close_request, self._request)
