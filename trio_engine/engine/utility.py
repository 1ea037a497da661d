"""Utility calls: typed arguments, answers now or later, and always exactly one.

Engine. Which methods there are is in ``utility_methods.py``. A handler is called by the step loop
in the order of messages, so what it does at once comes before whatever its client sent next; an
awaitable that it returns goes on as a task.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, get_origin

import msgspec

from trio_engine.engine.utility_methods import built_in_methods
from trio_engine.errors import EngineError, ProtocolError, RequestError, brief
from trio_engine.outputs import EngineCoreOutputs, UtilityOutput, UtilityResult
from trio_engine.wire.codec import OutputsEncoder

if TYPE_CHECKING:
    import trio

    from trio_engine.engine.step_loop import StepLoop
    from trio_engine.wire.messages import UtilityCall

FAILURE_LENGTH = 4000
"""Characters of a reason: a handler's own may be a traceback, but not the value that it refuses."""

MAX_CALLS_IN_PROGRESS = 256
"""Of one client. A call that waits is a task and an answer to come, and neither counts as unsent
output: without this bound a client that asks on and on would fill the memory."""

TOO_MANY_CALLS = f"{MAX_CALLS_IN_PROGRESS} calls of this client wait already"

UtilityHandler = Callable[..., Any]
"""Takes a call's arguments, returns the result or an awaitable of it."""


class UtilityMethod:
    """A handler and the types of its arguments.

    Args:
        handler: with positional parameters; annotated ones are converted by msgspec.

    Attributes:
        waits: whether it says that its result comes later: it is ``async def``, or annotated so.
    """

    def __init__(self, handler: UtilityHandler) -> None:
        self._handler = handler
        self._signature = inspect.signature(handler, eval_str=True)
        self._types = [
            Any if parameter.annotation is parameter.empty else parameter.annotation
            for parameter in self._signature.parameters.values()
        ]
        returned = self._signature.return_annotation
        returned = get_origin(returned) or returned
        is_awaitable = isinstance(returned, type) and issubclass(returned, Awaitable)
        self.waits = is_awaitable or inspect.iscoroutinefunction(handler)

    def __call__(self, args: list[Any]) -> Any:
        """Calls the handler; RequestError if the arguments do not fit it."""
        if len(args) > len(self._types):
            raise RequestError(f"takes at most {len(self._types)} arguments, got {len(args)}")
        try:
            values = [
                msgspec.convert(value, wanted)
                for value, wanted in zip(args, self._types, strict=False)
            ]
            bound = self._signature.bind(*values)
        except (TypeError, msgspec.ValidationError) as error:
            raise RequestError(str(error)) from error
        return self._handler(*bound.args)


class UtilityCalls:
    """Answers utility calls of an engine.

    Args:
        loop: into whose outboxes the answers go.
        nursery: of tasks that wait for later results; cancelled when the engine ends.
        extra: methods of the library's user, by name; they may replace built-in ones.
    """

    def __init__(
        self, loop: StepLoop, nursery: trio.Nursery, extra: Mapping[str, UtilityHandler]
    ) -> None:
        self._loop = loop
        self._nursery = nursery
        self._encoder = OutputsEncoder()
        self._num_in_progress: Counter[int] = Counter()  # by client
        handlers = {**built_in_methods(loop), **extra}
        self._methods = {name: UtilityMethod(handler) for name, handler in handlers.items()}

    def start(self, call: UtilityCall) -> None:
        """Calls a method and answers, at once or by a task. Never raises for what it is sent."""
        method = self._methods.get(call.method)
        try:
            if method is None:
                raise RequestError("this engine has no such method")
            if method.waits and self._is_full(call.client_index):
                raise RequestError(TOO_MANY_CALLS)  # and has changed nothing
            result = method(call.args)
        except Exception as error:
            self._answer_failure(call, error)
            return
        if not inspect.isawaitable(result):
            self._answer(call, result)
        elif self._is_full(call.client_index):  # a user's method that did not say that it waits
            if inspect.iscoroutine(result):
                result.close()
            self._answer_failure(call, RequestError(TOO_MANY_CALLS))
        else:
            self._num_in_progress[call.client_index] += 1
            self._nursery.start_soon(self._finish, call, result, name=f"utility {call.method}")

    def _is_full(self, client_index: int) -> bool:
        return self._num_in_progress[client_index] >= MAX_CALLS_IN_PROGRESS

    async def _finish(self, call: UtilityCall, pending: Awaitable[Any]) -> None:
        try:
            result = await pending
        except Exception as error:
            self._answer_failure(call, error)
        except BaseException:  # Cancelled, or a group of it from a nursery of the handler's own
            self._loop.keep_unanswered(call)  # why the engine ends is not known here
            raise
        else:
            self._answer(call, result)
        finally:
            self._num_in_progress[call.client_index] -= 1

    def _answer(self, call: UtilityCall, result: Any) -> None:
        output = UtilityOutput(call.call_id, result=UtilityResult(None, result))
        try:
            # In an outbox it would be the writer that meets what cannot be encoded.
            frames = self._encoder.encode(EngineCoreOutputs(utility_output=output))
        except ProtocolError as error:
            self._answer_failure(call, error)
        else:
            result_bytes = sum(map(len, frames))
            self._loop.answer(call.client_index, output, result_bytes=result_bytes)

    def _answer_failure(self, call: UtilityCall, error: Exception) -> None:
        reason = str(error) if isinstance(error, EngineError) else repr(error)
        reason = brief(reason, FAILURE_LENGTH)
        failure = f"Call to {brief(call.method)} method failed: {reason}"
        self._loop.answer(call.client_index, UtilityOutput(call.call_id, failure_message=failure))
