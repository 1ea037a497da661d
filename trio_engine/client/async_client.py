"""The client behind ``EngineClient``: requests, calls, and their ends, whatever carries them.

No transport here: a ``MessageSender`` carries messages away, and who receives an engine's outputs
hands them to ``apply``. Neither waits for a caller, and no caller waits for them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio

from trio_engine.client.base import EngineClient
from trio_engine.client.parent_request import ParentRequest
from trio_engine.client.request_table import RequestTable
from trio_engine.client.statistics import ClientStatistics, merge_scheduler_stats
from trio_engine.client.utility_calls import UtilityCalls
from trio_engine.errors import (
    EngineClosedError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from trio_engine.wire.messages import UtilityCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from trio_engine.client.request import RequestSpec
    from trio_engine.client.sender import MessageSender
    from trio_engine.outputs import EngineCoreOutputs, SchedulerStats
    from trio_engine.text.processor import PreparedPrompt, TextProcessor
    from trio_engine.wire.messages import ReadyResponse

logger = logging.getLogger(__name__)

CLIENT_INDEX = 0
"""Engines are told of one input and one output, so their first client is this one."""

LONG_PROMPT_CHARS = 10_000
"""A longer text is tokenized in a thread. Tokenizers do about 1 million characters a second: up
to here that is 10 ms in which no other stream moves, and a thread's round trip costs 0.1 ms."""

FLUSH_TIMEOUT_S = 1.0
"""Wait at the end for the last ABORTs to be handed to ZeroMQ, which normally takes no time."""


class AsyncEngineClient(EngineClient):
    """Made by ``open_wire_client`` or ``open_inproc_engine``.

    Counterpart: ``vllm/v1/engine/core_client.py`` ``AsyncMPClient`` together with the output
    handler of ``async_llm.py``. There a dead engine fails waiting streams only; utility calls
    wait for ever, and an unknown utility answer ends the receiver.

    Args:
        sender: carries messages to engines; ``run_sender`` is to be run by a task.
        engines: what each engine announced, by its index.
        text: prepares prompts and follows outputs.
        max_in_flight: requests that may be open at once.
        explain_death: turns what was noticed into the error that everybody gets; may wait a
            moment for the process to tell more.
    """

    def __init__(
        self,
        sender: MessageSender,
        engines: Mapping[int, ReadyResponse | None],
        text: TextProcessor,
        *,
        max_in_flight: int | None,
        explain_death: Callable[[str], Awaitable[EngineDeadError]],
    ) -> None:
        self._sender = sender
        self._engines = engines
        self._text = text
        self._max_in_flight = max_in_flight
        self._explain_death = explain_death

        self._requests = RequestTable()
        self._utility_calls = UtilityCalls()
        self._scheduler_stats: dict[int, SchedulerStats] = {}

        # Set once, by death or closing, whichever is first: what waiters and later calls get.
        self._make_error: Callable[[], Exception] | None = None
        self._death: EngineDeadError | None = None
        self._ended = trio.Event()

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    @property
    def engines(self) -> Mapping[int, ReadyResponse | None]:
        return self._engines

    def statistics(self) -> ClientStatistics:
        return ClientStatistics(
            num_requests=len(self._requests),
            num_utility_calls=len(self._utility_calls),
            num_unsent=self._sender.num_unsent,
            is_dead=self.is_dead,
            scheduler=dict(self._scheduler_stats),
        )

    async def wait_dead(self) -> EngineDeadError:
        await self._ended.wait()
        if self._death is None:
            raise EngineClosedError("the client was closed while its engine was alive")
        return _copy_of(self._death)

    # KeyboardInterrupt is held off where a table and an outbox must change together.
    @trio.lowlevel.enable_ki_protection
    def abort(self, request_id: str) -> bool:
        aborted = self._requests.abort(request_id)
        for request in aborted:
            self._sender.abort(request.engine_index, request.internal_id)
        return bool(aborted)

    @trio.lowlevel.enable_ki_protection
    async def call_utility(self, method: str, *args: Any) -> Any:
        self._check_open()
        calls = {index: self._utility_calls.open(method) for index in self._engines}
        try:
            for index, call in calls.items():
                message = UtilityCall(CLIENT_INDEX, call.call_id, method, list(args))
                self._sender.post(index, call.call_id, message)
            # All engines must have done it; the first one's word counts.
            results = [await call.wait_result() for call in calls.values()]
        finally:
            for index, call in calls.items():
                self._utility_calls.forget(call)
                self._sender.withdraw(index, call.call_id)
        return results[0]

    async def _open_request(self, spec: RequestSpec) -> ParentRequest:
        self._check_open()
        prepared = await self._prepare(spec)
        # No await from here on: all of a request is registered and posted, or nothing.
        self._check_open()
        self._check_room(spec.params.n)
        request = ParentRequest(spec, prepared, self._text, self._pick_engine)
        try:
            for child in request.children:
                message = child.to_message(CLIENT_INDEX)
                self._sender.post(child.engine_index, child.internal_id, message)
                self._requests.add(child)
        except RequestError:
            self._close_request(request)
            raise
        return request

    def _check_room(self, num_answers: int) -> None:
        limit, num_open = self._max_in_flight, len(self._requests)
        if limit is not None and num_open + num_answers > limit:
            raise OverloadedError(
                f"{num_open} requests are in flight, and max_in_flight is {limit}"
                + (f": no room for {num_answers} answers" if num_answers > 1 else "")
            )

    def _close_request(self, request: ParentRequest) -> None:
        for child in request.children:
            if self._requests.discard(child):
                self._sender.abort(child.engine_index, child.internal_id)

    async def _prepare(self, spec: RequestSpec) -> PreparedPrompt:
        """Tokenizes. A checkpoint in any case; cancelling it leaves nothing behind."""
        if isinstance(spec.prompt, str) and len(spec.prompt) > LONG_PROMPT_CHARS:
            # Abandoned when cancelled: it only computes.
            return await trio.to_thread.run_sync(spec.prepare, self._text, abandon_on_cancel=True)
        await trio.lowlevel.checkpoint()
        return spec.prepare(self._text)

    def _pick_engine(self) -> int:
        return next(iter(self._engines))

    def _check_open(self) -> None:
        if self._make_error is not None:
            raise self._make_error()

    # For the tasks behind

    async def run_sender(self) -> None:
        """Carries messages away until the client is closed. A task of whoever made it."""
        try:
            await self._sender.run()
        except Exception as error:  # task boundary: whatever it is, callers must hear of it
            await self.notice_death("its connection is gone", error)

    def apply(self, outputs: EngineCoreOutputs) -> None:
        """Takes one message of an engine."""
        if outputs.scheduler_stats is not None:
            index = outputs.engine_index
            self._scheduler_stats[index] = merge_scheduler_stats(
                self._scheduler_stats.get(index), outputs.scheduler_stats
            )
        for request in self._requests.apply(outputs):
            self._sender.abort(request.engine_index, request.internal_id)
        if outputs.utility_output is not None and not self._utility_calls.answer(
            outputs.utility_output
        ):
            logger.debug("utility_answer_ignored call_id=%d", outputs.utility_output.call_id)

    async def notice_death(self, noticed: str, cause: Exception | None = None) -> None:
        """``die``, with what can be found out about it."""
        error = await self._explain_death(noticed)
        error.__cause__ = cause
        self.die(error)

    def die(self, death: EngineDeadError) -> None:
        """Fails everything that waits. For whoever watches the engine; the first word counts."""
        if self._make_error is None:
            if death.was_asked_to_stop:
                logger.warning("engine_stopped reason=%s", death)
            else:
                logger.error("engine_dead reason=%s", death)
            self._death = death
            self._sender.discard()
            self._end(lambda: _copy_of(death))

    async def aclose(self) -> None:
        """Ends what is open, at the engine too.

        Cancellation: shielded, for ``FLUSH_TIMEOUT_S`` at most.
        """
        if self._make_error is None:
            for request in self._requests:
                self._sender.abort(request.engine_index, request.internal_id)
            self._end(lambda: EngineClosedError("this client was closed"))
        self._sender.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FLUSH_TIMEOUT_S):
            await self._sender.wait_ended()

    def _end(self, make_error: Callable[[], Exception]) -> None:
        self._make_error = make_error
        self._requests.fail_all(make_error)
        self._utility_calls.fail_all(make_error)
        self._ended.set()


def _copy_of(death: EngineDeadError) -> EngineDeadError:
    """Each waiter raises its own: a shared exception would collect everybody's traceback."""
    copy = EngineDeadError(str(death), exit_status=death.exit_status, stderr_tail=death.stderr_tail)
    copy.__cause__ = death.__cause__
    for note in getattr(death, "__notes__", ()):
        copy.add_note(note)
    return copy
