"""A Trio run that stands still between calls, so that synchronous code can drive it.

Public kit: it lets a Hypothesis state machine, whose rules cannot be async, test tasks. The run is
a guest (``trio.lowlevel.start_guest_run``) of a plain queue, which is worked off only while a call
is made; its clock is a mock and moves only when told. There are no threads: one task of the run is
always ready to go on, so Trio never waits for I/O.
"""

from __future__ import annotations

import inspect
import queue
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_TICKS = 20_000
"""Scheduler ticks of one call; a run that needs more spins."""


class GuestRun:
    """Runs ``main`` as far as it gets, and further with each call.

    One at a time in a thread. Tasks must not wait for threads, sockets or processes: those are
    not waited for.

    Args:
        main: the run's main task; ``close`` cancels it.

    Attributes:
        clock: of the run.
    """

    def __init__(self, main: Callable[[], Awaitable[object]]) -> None:
        self.clock = MockClock()
        self._main = main
        self._scope = trio.CancelScope()
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._ticks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # Trio's outcome of the main task.
        self._ended: Any = None
        trio.lowlevel.start_guest_run(
            self._run,
            run_sync_soon_threadsafe=self._ticks.put,
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
        assert self._ended is None, f"the run has ended: {self._ended}"
        call = _Call(function, args)
        self._calls.put(call)
        self._tick_until(lambda: call.is_settled or self._ended is not None)
        if call.error is not None:
            raise call.error
        assert call.is_settled, f"the run has ended: {self._ended}"
        return call.value

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
            # Not as a call: one that spins may be in its way.
            self._token.run_sync_soon(self._cancel)
            self._tick_until(lambda: self._ended is not None)
        self._ended.unwrap()

    async def _run(self) -> None:
        trio.lowlevel.spawn_system_task(self._serve)
        with self._scope:
            await self._main()

    async def _serve(self) -> None:
        while self.clock.autojump_threshold > 0:
            if self._calls.empty():
                await trio.lowlevel.checkpoint()  # ready at once: keeps Trio from waiting for I/O
            else:
                await self._calls.get().run()

    def _cancel(self) -> None:
        # Clean-up may wait for deadlines, which come as soon as nothing else can go on.
        self.clock.autojump_threshold = 0.0
        self._scope.cancel()

    def _end(self, ended: Any) -> None:
        self._ended = ended

    def _tick_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(MAX_TICKS):
            if is_done():
                return
            self._ticks.get_nowait()()
        raise AssertionError(f"{MAX_TICKS} ticks were not enough: something spins")


class _Call:
    """A function to call inside the run, and what came of it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.is_settled = False
        self._function = function
        self._args = args

    async def run(self) -> None:
        try:
            result = self._function(*self._args)
            self.value = await result if inspect.isawaitable(result) else result
        except Exception as error:
            self.error = error
        await wait_all_tasks_blocked()
        self.is_settled = True


def _nothing() -> None:
    pass
