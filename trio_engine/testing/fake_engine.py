"""An engine for a service's own tests: no process, no threads, no sockets, no model.

Public kit. Imports neither torch nor zmq nor pytest. It is the real client on the real step loop
and core; only the executor answers what a test wrote down (``fake_executor``), and steps take time
by Trio's clock (``timed_forward``), which may be a mock.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.client.base import EngineClient
from trio_engine.client.inproc_client import open_inproc_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import RequestError
from trio_engine.testing.byte_tokenizer import EOS_TOKEN_ID, make_byte_tokenizer
from trio_engine.testing.fake_executor import Asked as Asked, FakeExecutor
from trio_engine.testing.timed_forward import TimedForward, open_timed_forward

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

    from trio_engine.client.parent_request import ParentRequest
    from trio_engine.client.request import RequestSpec
    from trio_engine.client.statistics import ClientStatistics
    from trio_engine.errors import EngineDeadError
    from trio_engine.executor.base import Executor
    from trio_engine.testing.fake_executor import AnswerFunction
    from trio_engine.text.tokenizer import Tokenizer
    from trio_engine.wire.messages import ReadyResponse

CONFIG = EngineConfig(executor="null", max_num_seqs=64, pipeline_depth=1)
"""Limits unless told otherwise: 64 requests at once, 2,048 tokens each. One step is in flight, so
that what was aborted takes no more time than the step that runs."""


class FakeEngine(EngineClient):
    """A client of an engine that a test plays. Made by ``open_fake_engine``."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        executor: FakeExecutor,
        forward: TimedForward,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._executor = executor
        self._forward = forward

    @property
    def asked(self) -> Sequence[Asked]:
        """The requests that the engine has started, oldest first."""
        return self._executor.asked

    def kill(self, reason: str = "killed by the test") -> None:
        """Has the engine die: everything that waits raises ``EngineDeadError``, in a moment."""
        self._forward.fail(RuntimeError(reason))

    # The face

    def abort(self, request_id: str) -> bool:
        return self._client.abort(request_id)

    async def call_utility(self, method: str, *args: Any) -> Any:
        return await self._client.call_utility(method, *args)

    async def wait_dead(self) -> EngineDeadError:
        return await self._client.wait_dead()

    def statistics(self) -> ClientStatistics:
        return self._client.statistics()

    @property
    def is_dead(self) -> bool:
        return self._client.is_dead

    @property
    def engines(self) -> Mapping[int, ReadyResponse | None]:
        return self._client.engines

    async def _open_request(self, spec: RequestSpec) -> ParentRequest:
        if spec.params.structured_outputs is not None:
            raise RequestError("structured_outputs is not served by a fake engine")
        if isinstance(spec.prompt, str):
            # A long text would be tokenized in a thread, which a mock clock does not see.
            spec = msgspec.structs.replace(spec, prompt=self._tokenizer.encode(spec.prompt))
        return await self._client._open_request(spec)

    def _close_request(self, request: ParentRequest) -> None:
        self._client._close_request(request)


@asynccontextmanager
async def open_fake_engine(
    answer: AnswerFunction | str = lambda asked: asked.prompt,
    *,
    tokens_per_s: float = 50.0,
    prefill_s: float = 0.0,
    config: EngineConfig = CONFIG,
    max_in_flight: int | None = None,
) -> AsyncIterator[FakeEngine]:
    """Opens an engine that answers as told; use it where the service has ``open_engine``.

    Prompts may be text, token ids or a chat. A token is a byte (``byte_tokenizer``).

    Args:
        answer: to every request the same text, or a function of what was asked, called once for
            each request. What it raises ends that request with ERROR, which its reader gets as
            ``RequestFailedError``. Unless given, an answer repeats its prompt.
        tokens_per_s: of each request, however many run; ``math.inf`` takes no time. A request
            joins at the end of the step that runs.
        prefill_s: time to the first token beyond that. Whatever runs beside waits, as it does
            for a real prefill.
        config: limits of the engine, such as ``max_num_seqs`` and ``max_waiting_requests``.
        max_in_flight: requests that may be open at once; beyond it ``OverloadedError``.

    Example::

        async with open_fake_engine("Paris.", tokens_per_s=10) as engine:
            output = await engine.complete("The capital of France is")
            assert output.text == "Paris."

    Cancellation: leaves at once.
    """
    tokenizer = make_byte_tokenizer()
    executor = FakeExecutor(
        config,
        encode=tokenizer.encode,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
        eos_token_id=EOS_TOKEN_ID,
        answer=answer if callable(answer) else lambda _: answer,
        token_s=1.0 / tokens_per_s,
        prefill_s=prefill_s,
    )
    forwards: list[TimedForward] = []

    @asynccontextmanager
    async def open_forward(
        _: Executor, on_event: Callable[[], object]
    ) -> AsyncGenerator[TimedForward]:
        async with open_timed_forward(executor, on_event) as forward:
            forwards.append(forward)
            yield forward

    async with open_inproc_engine(
        config,
        lambda _: executor,
        tokenizer=tokenizer,
        max_in_flight=max_in_flight,
        open_forward=open_forward,
    ) as client:
        yield FakeEngine(client, tokenizer, executor, forwards[0])
