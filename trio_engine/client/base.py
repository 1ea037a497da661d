"""The client's face: what a service uses of an engine, wherever that engine runs.

No transport here. Implementations: ``async_client`` over the wire, ``inproc_client`` without.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from trio_engine.client.request import RequestOptions, RequestSpec
from trio_engine.client.stream import RequestStream
from trio_engine.core.statistics import EngineCoreStatistics
from trio_engine.errors import ProtocolError, RequestError
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio_engine.client.outputs import RequestOutput
    from trio_engine.client.parent_request import ParentRequest
    from trio_engine.client.statistics import ClientStatistics
    from trio_engine.errors import EngineDeadError
    from trio_engine.text.processor import Prompt
    from trio_engine.wire.messages import ReadyResponse


class EngineClient(abc.ABC):
    """Requests to an engine, from any number of tasks of one Trio run.

    Made by ``open_engine`` or ``connect_engine``. When the engine dies, everything that waits
    raises ``EngineDeadError`` and so does every later call; the block that holds the client is
    not cancelled.
    """

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """A stream of one request's outputs, to be entered with ``async with``.

        Args:
            prompt: text, token ids, or the messages of a chat.
            params: how to sample and when to stop; ``output_kind`` says what an item holds.
            options: see ``RequestOptions``.

        Raises:
            RequestError: ``params`` ask for too many answers. Other faults show on entering.
        """
        return RequestStream(self, RequestSpec.of(prompt, params, options))

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """The whole answer to one request, whatever ``params.output_kind`` says.

        Raises:
            RequestError: ``params.n`` is not 1; ``complete_all`` returns several answers.
            EngineError: as ``RequestStream`` does.

        Cancellation: aborts the request.
        """
        if params is not None and params.n != 1:
            raise RequestError(f"complete returns 1 answer, got n={params.n}: use complete_all")
        (answer,) = await self.complete_all(prompt, params, **options)
        return answer

    async def complete_all(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """All ``params.n`` answers, each whole, in the order of their ``index``.

        Raises:
            EngineError: as ``RequestStream`` does; one answer that fails ends the others.

        Cancellation: aborts what has not ended.
        """
        params = msgspec.structs.replace(
            params or SamplingParams(), output_kind=RequestOutputKind.FINAL_ONLY
        )
        async with self.generate(prompt, params, **options) as stream:
            answers = [output async for output in stream]
        return sorted(answers, key=lambda answer: answer.index)

    @abc.abstractmethod
    def abort(self, request_id: str) -> bool:
        """Ends requests from outside of their stream: each gets a last item with ABORT.

        Args:
            request_id: as given to ``generate``; every open request of that name ends.

        Returns:
            Whether there was one.
        """

    @abc.abstractmethod
    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of the engine's utility methods (``pause_scheduler``, ``sleep``, ...).

        Raises:
            UtilityError: the engine refused it, or it failed there.
            RequestError: an argument has no wire form.
            EngineDeadError: also while waiting.
            EngineClosedError: likewise.

        Cancellation: a call that has left is carried out all the same, and its answer ignored.
        """

    @abc.abstractmethod
    async def wait_dead(self) -> EngineDeadError:
        """Waits until the engine has ended, for supervisors.

        Returns:
            What later calls raise; its ``was_asked_to_stop`` tells an end in good order.

        Raises:
            EngineClosedError: the client was closed first.
        """

    @abc.abstractmethod
    def statistics(self) -> ClientStatistics:
        """Counts for monitoring and tests."""

    async def engine_statistics(self) -> EngineCoreStatistics:
        """What the engine counts: requests, blocks, and where the time of its steps went.

        An engine of ours tells it; vLLM's has no such call. Of several engines it is the first's.

        Raises:
            UtilityError: the engine cannot tell.
            ProtocolError: what it tells is something else.
            EngineDeadError: also while waiting.
            EngineClosedError: likewise.
        """
        answer = await self.call_utility("get_statistics")
        try:
            return msgspec.convert(answer, EngineCoreStatistics)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the answer to get_statistics: {error}") from error

    @property
    @abc.abstractmethod
    def is_dead(self) -> bool:
        """Whether the engine has ended, by a crash or because somebody else asked it to stop.

        Nothing is answered any more then. False after the end of this client's own block.
        """

    @property
    @abc.abstractmethod
    def engines(self) -> Mapping[int, ReadyResponse | None]:
        """What each engine announced, by its index; None if it announced nothing."""

    @abc.abstractmethod
    async def _open_request(self, spec: RequestSpec) -> ParentRequest: ...

    @abc.abstractmethod
    def _close_request(self, request: ParentRequest) -> None: ...
