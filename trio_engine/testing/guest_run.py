"""A Trio run that stands still between calls, so that synchronous code can drive it.

Public kit: it lets a Hypothesis state machine, whose rules cannot be async, test tasks. The run is
a guest (``trio.lowlevel.start_guest_run``) of a plain queue, which is worked off only while a call
is made; its clock is a mock and moves only when told.
"""

from __future__ import annotations

import inspect
import queue
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_TICKS = 100_000
"""Scheduler ticks of one call; a run that needs more spins."""

TICK_TIMEOUT_S = 30.0
"""Real time that one tick may take to come."""


class GuestRun:
    """Runs ``main`` as far as it gets, and further with each call.

    One at a time in a thread.

    Args:
        main: the run's main task; ``close`` cancels it.

    Attributes:
        clock: of the run.
    """

    def __init__(self, main: Callable[[], Awaitable[object]]) -> None:
        self.clock = MockClock()
        self._callbacks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Trio's outcome of the main task.
        self._ended: Any = None
        self._scope = trio.CancelScope()

        async def run() -> None:
            with self._scope:
                await main()

        trio.lowlevel.start_guest_run(
            run,
            run_sync_soon_threadsafe=self._callbacks.put,
            done_callback=self._end,
            clock=self.clock,
            # The host shares no wake-up descriptor, and its signals are not the run's.
            host_uses_signal_set_wakeup_fd=True,
        )
        self._token = trio.lowlevel.current_trio_token()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a sync or async function inside, waits until all tasks are blocked.

        Returns:
            What it returned.

        Raises:
            AssertionError: the run has ended, or its tasks spin.
            Exception: what the function raised.
        """
        values: list[Any] = []
        errors: list[Exception] = []
        is_settled = False

        async def answer() -> None:
            nonlocal is_settled
            try:
                result = function(*args)
                values.append(await result if inspect.isawaitable(result) else result)
            except Exception as error:
                errors.append(error)
            await wait_all_tasks_blocked()
            is_settled = True

        assert self._ended is None, f"the run has ended: {self._ended}"
        self._token.run_sync_soon(trio.lowlevel.spawn_system_task, answer)
        self._tick_until(lambda: is_settled or self._ended is not None)
        if errors:
            raise errors[0]
        assert is_settled, f"the run has ended: {self._ended}"
        return values[0]

    def settle(self) -> None:
        """Lets every task go as far as it gets."""
        self.call(_nothing)

    def jump(self, seconds: float) -> None:
        """Lets time pass, and what waited for it happen."""
        self.clock.jump(seconds)
        self.settle()

    def close(self) -> None:
        """Cancels the main task and waits for the end of the run, in mock time without limit.

        Raises:
            AssertionError: it does not end.
            BaseException: what the main task raised.
        """
        if self._ended is None:
            self._token.run_sync_soon(self._cancel)
            self._tick_until(lambda: self._ended is not None)
        self._ended.unwrap()

    def _cancel(self) -> None:
        # Clean-up may wait for deadlines.
        self.clock.autojump_threshold = 0.0
        self._scope.cancel()

    def _end(self, ended: Any) -> None:
        self._ended = ended

    def _tick_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(MAX_TICKS):
            if is_done():
                return
            try:
                callback = self._callbacks.get(timeout=TICK_TIMEOUT_S)
            except queue.Empty:
                raise AssertionError("the run does not come back") from None
            callback()
        raise AssertionError(f"{MAX_TICKS} ticks were not enough: something spins")


def _nothing() -> None:
    pass
