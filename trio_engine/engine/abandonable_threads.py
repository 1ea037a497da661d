"""Threads whose work may be left behind: never waited for, and counted until they return.

Engine.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import trio

from trio_engine.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable

    T = TypeVar("T")


class AbandonableThreads:
    """Calls functions in threads that a cancellation leaves behind.

    Args:
        max_abandoned: threads that may go on for nobody at once.

    Attributes:
        num_abandoned: threads that do. The end of the run does not wait for them; the end of the
            interpreter might not go well beside them, the end of the process does.
    """

    def __init__(self, max_abandoned: int) -> None:
        self.num_abandoned = 0
        self._max_abandoned = max_abandoned

    async def run_sync(self, function: Callable[..., T], *args: object) -> T:
        """Calls a function in a thread.

        Raises:
            OverloadedError: too many threads go on for nobody.

        Cancellation: returns at once; the thread goes on, and what comes of it is dropped.
        """
        await trio.lowlevel.checkpoint_if_cancelled()  # so that from here on the thread starts
        if self.num_abandoned >= self._max_abandoned:
            raise OverloadedError(f"{self.num_abandoned} threads go on that nobody waits for")
        token = trio.lowlevel.current_trio_token()
        call = _Call()

        def run() -> T:
            try:
                return function(*args)
            finally:
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(self._note_return, call)

        try:
            # A limiter for each: one that is left behind must not keep the next one waiting.
            return await trio.to_thread.run_sync(
                run, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
            )
        except trio.Cancelled:
            if not call.has_returned:
                call.is_abandoned = True
                self.num_abandoned += 1
            raise

    def _note_return(self, call: _Call) -> None:
        call.has_returned = True
        if call.is_abandoned:
            self.num_abandoned -= 1


class _Call:
    """One call, seen from Trio's thread."""

    def __init__(self) -> None:
        self.has_returned = False
        self.is_abandoned = False
