"""Utility calls that wait for an answer.

Holds waiters only: sending belongs to the client that owns this table.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import trio

from trio_engine.errors import ProtocolError, UtilityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.outputs import UtilityOutput


class UtilityCall:
    """One call: its number, and its answer once there is one."""

    def __init__(self, call_id: int, method: str) -> None:
        self.call_id = call_id
        self.method = method
        self._settled = trio.Event()
        self._result: Any = None
        self._failure: Exception | None = None

    async def wait_result(self) -> Any:
        """Waits for the answer and returns its value, or raises what ``fail`` was given."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self._result

    def answer(self, output: UtilityOutput) -> None:
        """Settles the call by the engine's answer."""
        if output.failure_message is not None:
            self.fail(UtilityError(output.failure_message))
        elif output.result is None:
            self.fail(ProtocolError(f"the answer to {self.method} has neither result nor failure"))
        else:
            self._result = output.result.value
            self._settled.set()

    def fail(self, error: Exception) -> None:
        """Settles the call by an error."""
        self._failure = error
        self._settled.set()


class UtilityCalls:
    """Pending calls by number. An answer to anything else is dropped: its caller has left."""

    def __init__(self) -> None:
        self._calls: dict[int, UtilityCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, method: str) -> UtilityCall:
        """Registers a call under a new number.

        The number is random over 64 bits: an engine that outlived an earlier client at the same
        address may still answer that one's calls.
        """
        call = UtilityCall(secrets.randbits(64), method)
        self._calls[call.call_id] = call
        return call

    def forget(self, call: UtilityCall) -> None:
        """Drops a call, answered or not."""
        self._calls.pop(call.call_id, None)

    def answer(self, output: UtilityOutput) -> bool:
        """Settles the call that ``output`` answers; False if nobody waits for it."""
        call = self._calls.pop(output.call_id, None)
        if call is None:
            return False
        call.answer(output)
        return True

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Settles every call by an error of its own."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(make_error())
