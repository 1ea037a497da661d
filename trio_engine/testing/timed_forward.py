"""The forward thread without a thread: plans run by themselves, and take time by Trio's clock.

Public kit. It is the real ``ForwardThread`` on a task of Trio's, so that under a mock clock a step
takes exactly as long as it says, and no time of yours.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import trio

from trio_engine.engine.doorbell import Doorbell
from trio_engine.engine.forward_thread import ForwardThread
from trio_engine.executor.base import Executor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from trio_engine.core.plan import DeviceCommand, StepPlan


class TimedExecutor(Executor, Protocol):
    """An executor that says how long its steps take and returns at once.

    Attributes:
        step_s: of the plan that was launched last.
    """

    step_s: float


class TimedForward(ForwardThread):
    """Serves what is submitted, in order. Made by ``open_timed_forward``."""

    def __init__(self, executor: TimedExecutor, on_event: Callable[[], object]) -> None:
        super().__init__(executor, on_event)
        self._timed_executor = executor
        self._doorbell = Doorbell()

    def submit(self, item: StepPlan | DeviceCommand) -> None:
        """Queues a plan or a command."""
        super().submit(item)
        self._doorbell.ring()

    def nudge(self) -> None:
        """Says that no plan follows for now."""
        super().nudge()
        self._doorbell.ring()

    def fail(self, error: Exception) -> None:
        """The executor is broken, now: the engine dies of this error."""
        self._break(error)

    async def serve_all(self) -> None:
        """Does what there is to do, for ever. Cancellation: the step that runs has no result."""
        while True:
            await self._doorbell.wait()
            while self.has_work:
                if self._launched:
                    await trio.sleep(self._timed_executor.step_s)
                if self.has_work:
                    self.serve()


@asynccontextmanager
async def open_timed_forward(
    executor: TimedExecutor, on_event: Callable[[], object]
) -> AsyncGenerator[TimedForward]:
    """As ``open_forward_thread``. Cancellation: leaves at once, whatever runs."""
    forward = TimedForward(executor, on_event)
    forward.load()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(forward.serve_all, name="timed forward")
        try:
            yield forward
        finally:
            forward.stop()
            forward.shut_down()
            nursery.cancel_scope.cancel()
