"""The one thread that owns the device, and the way to it and back.

Engine. Plans and commands go by a ``SimpleQueue``, the one place where a thread must wait; results
come back in a deque of at most two, and ring a bell. One thread for the engine's whole life: a
``to_thread`` round trip per step costs 100-300 µs (design note ``pipeline.md``).
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trio_engine.core.plan import DeviceCommand, ExecutorProperties, StepPlan, StepResult
from trio_engine.core.step_phases import DeviceClock
from trio_engine.errors import RequestStepError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from trio_engine.executor.base import Executor

logger = logging.getLogger(__name__)


class _Order(enum.Enum):
    COLLECT = "collect"
    """No plan follows for now: wait for the launched one instead of for another to launch."""
    STOP = "stop"


class StepFailed(msgspec.Struct, frozen=True):
    """A plan failed because of some of its rows; plans behind it were or will be dropped."""

    plan_id: int
    error: RequestStepError


class CommandDone(msgspec.Struct, frozen=True):
    """The answer to a command; ``error`` is None if it went well."""

    command_id: int
    value: Any = None
    error: Exception | None = None


class Loaded(msgspec.Struct, frozen=True):
    """The executor is ready."""

    properties: ExecutorProperties


class Broken(msgspec.Struct, frozen=True):
    """The executor raised what ends the engine; the thread has ended."""

    error: BaseException


ForwardEvent = Loaded | StepResult | StepFailed | CommandDone | Broken


class ForwardThread:
    """Hands plans to an executor and events back. Made by ``open_forward_thread``.

    ``run`` is the thread's body. Its parts may be called one by one instead, by whoever does
    without a thread.

    Args:
        executor: not loaded yet.
        on_event: called after each event was put into ``events``, on this thread.

    Attributes:
        events: what came back, oldest first; the step loop takes them out.
        device: when the executor had a plan.
        is_loading: whether nothing has come back yet, not even that the load failed.
    """

    def __init__(self, executor: Executor, on_event: Callable[[], object]) -> None:
        self.events: deque[ForwardEvent] = deque()
        self.device = DeviceClock()
        self.is_loading = True
        self._executor = executor
        self._on_event = on_event
        self._orders: queue.SimpleQueue[StepPlan | DeviceCommand | _Order] = queue.SimpleQueue()
        self._is_stopping = False
        # Plans launched and not collected; the thread's own.
        self._launched: deque[StepPlan] = deque()
        # After a failed plan, those behind it are dropped until one starts anew.
        self._drops_plans = False

    @property
    def launches_ahead(self) -> bool:
        """Whether a plan waits in the executor for the next one: see ``nudge``."""
        return self._executor.launches_ahead

    def submit(self, item: StepPlan | DeviceCommand) -> None:
        """Queues a plan or a command; at most two plans are unsettled at any time."""
        self._orders.put(item)

    def nudge(self) -> None:
        """Says that no plan follows for now. Only for executors that launch ahead."""
        self._orders.put(_Order.COLLECT)

    def stop(self) -> None:
        """Ends the thread after the step that it is in; what is queued is dropped."""
        self._is_stopping = True
        self._orders.put(_Order.STOP)

    # The thread's side

    def run(self) -> None:
        """The thread's body: load, then serve until stopped, then release the device."""
        try:
            self.load()
            while not self._is_stopping:
                self.serve()
        finally:
            self.shut_down()

    def load(self) -> None:
        """Has the executor get ready, once and first: ``Loaded`` or ``Broken`` comes back."""
        try:
            self._deliver(Loaded(self._executor.load()))
        except BaseException as error:
            self._break(error)

    def serve(self) -> None:
        """Waits for the next thing to do, a launch, a collect or a command, and does it.

        After an error that is no row's fault ``Broken`` comes back, and nothing is done any more.
        """
        try:
            self._serve()
        except BaseException as error:
            self._break(error)

    @property
    def has_work(self) -> bool:
        """Whether ``serve`` would not have to wait."""
        is_full = len(self._launched) >= self._room
        return not self._is_stopping and (is_full or not self._orders.empty())

    def shut_down(self) -> None:
        """Releases the device, once and last."""
        try:
            self._executor.shutdown()
        except Exception:
            logger.exception("executor_shutdown_failed")

    @property
    def _room(self) -> int:
        """Plans that the executor may hold."""
        return 2 if self._executor.launches_ahead else 1

    def _serve(self) -> None:
        if len(self._launched) >= self._room:
            self._collect()
            return
        order = self._orders.get()
        if self._is_stopping:
            return
        if isinstance(order, StepPlan):
            self._launch(order)
        elif isinstance(order, DeviceCommand):
            self._command(order)
        elif order is _Order.COLLECT and self._launched:
            self._collect()

    def _break(self, error: BaseException) -> None:
        # Also SystemExit and the like of a foreign library: the engine must hear of it, and there
        # is no one above on this thread.
        self._is_stopping = True
        self._deliver(Broken(error))

    def _launch(self, plan: StepPlan) -> None:
        if self._drops_plans and not plan.reset:
            return
        self._drops_plans = False
        self.device.launched()
        try:
            self._executor.launch(plan)
        except RequestStepError as error:
            # Plans before it are good and settle first. If one of them fails now, this plan
            # stands behind a failed one and is not worth a word.
            while self._launched:
                if not self._collect():
                    return
            self._fail(plan, error)
        else:
            self._launched.append(plan)

    def _collect(self) -> bool:
        plan = self._launched.popleft()
        try:
            result = self._executor.collect()
        except RequestStepError as error:
            self._fail(plan, error)
            return False
        self.device.collected(plan)
        self._deliver(result)
        return True

    def _fail(self, plan: StepPlan, error: RequestStepError) -> None:
        self._drops_plans = True
        for _ in self._launched:
            with contextlib.suppress(RequestStepError):
                self._executor.collect()
        self._launched.clear()
        self.device.stopped()
        self._deliver(StepFailed(plan.plan_id, error))

    def _command(self, command: DeviceCommand) -> None:
        try:
            value = self._executor.command(command)
        except Exception as error:
            self._deliver(CommandDone(command.command_id, error=error))
        else:
            self._deliver(CommandDone(command.command_id, value))

    def _deliver(self, event: ForwardEvent) -> None:
        self.is_loading = False
        self.events.append(event)
        self._on_event()


@asynccontextmanager
async def open_forward_thread(
    executor: Executor, on_event: Callable[[], object]
) -> AsyncGenerator[ForwardThread]:
    """Runs an executor on a thread of its own for the length of the block.

    ``on_event`` is called on that thread after each event was put into ``events``:
    ``ThreadSafeDoorbell.ring``. The first event is ``Loaded`` or ``Broken``.

    Cancellation: a running step or load cannot be interrupted; the block is left when it returns.
    """
    thread = ForwardThread(executor, on_event)
    # Its own limiter: a service's to_thread calls must never wait for the engine or it for them.
    limiter = trio.CapacityLimiter(1)

    async def run() -> None:
        await trio.to_thread.run_sync(thread.run, limiter=limiter)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, name="forward thread")
        try:
            yield thread
        finally:
            thread.stop()
