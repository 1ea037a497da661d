"""Tasks that serve a body of code: they outlive its cancellation, not its end.

The one place where the client has a nursery around its caller's code. Nothing about engines
belongs here.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVarTuple

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")


class ServiceTasks:
    """The tasks of one ``open_service_tasks`` block."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        # One per running task. They are the killers of the shields below: the block's end
        # cancels them all, and nothing else does.
        self._scopes: set[trio.CancelScope] = set()
        self._ended = False

    def start_soon(self, async_fn: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        """Runs ``async_fn(*args)`` until it returns or the block is left.

        Cancelling the code around the block does not reach it, so it can still carry what the
        body does on its way out. KeyboardInterrupt is held off: Trio gives it to the main task.
        An exception is a fault of ours, since each task guards its own foreign calls; it is
        logged and ends that task only, because a crash here must not cancel the body.
        """
        self._nursery.start_soon(self._run, async_fn, args)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, async_fn: Callable[[*Ts], Awaitable[object]], args: tuple[*Ts]) -> None:
        if self._ended:
            return
        with trio.CancelScope(shield=True) as scope:
            self._scopes.add(scope)
            try:
                await async_fn(*args)
            except Exception:
                logger.exception("service_task_crashed task=%s", async_fn)
            finally:
                self._scopes.discard(scope)

    def _end(self) -> None:
        self._ended = True
        for scope in self._scopes:
            scope.cancel("the block that they served was left")


@asynccontextmanager
async def open_service_tasks() -> AsyncIterator[ServiceTasks]:
    """Opens a block with service tasks; leaving it cancels and awaits them.

    The body's exception leaves as it was raised: a nursery would put it in a group, so here it
    steps around the nursery.
    """
    raised: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            tasks = ServiceTasks(nursery)
            try:
                yield tasks
            except BaseException as exc:  # raised again below, Cancelled included
                raised = exc
            tasks._end()
    except BaseExceptionGroup as group:
        # Ctrl-C while the tasks end, perhaps for the second time: Trio raises it in the nursery.
        if group.split(KeyboardInterrupt)[1] is None:
            raise KeyboardInterrupt from group
        raise
    if raised is not None:
        try:
            raise raised
        finally:
            del raised  # or the traceback and this frame keep each other alive
