"""Leaving for good: the guard against a step that never returns, and the exit statuses.

Engine. Trio cannot leave a nursery whose thread has not returned, so only the end of the process
helps against a hanging driver call; a process that is not ours to end waits instead.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class ExitStatus(enum.IntEnum):
    """How an engine process ends."""

    STOPPED = 0
    """It was asked to."""
    CRASHED = 1
    START_UP_FAILED = 2


class ExitGuard:
    """Ends the process when its forward thread outstays an orderly end.

    Args:
        leave: flushes the last words and ends the process with a status; must not return. None
            where the process is not the engine's own: then the guard waits without a bound.
    """

    def __init__(self, leave: Callable[[ExitStatus], Awaitable[None]] | None) -> None:
        self._leave = leave
        self._armed = trio.Event()
        self._status = ExitStatus.STOPPED
        self._grace = trio.CancelScope()
        # Shielded: it must outlive the cancellation that it guards. ``disarm`` ends it.
        self._scope = trio.CancelScope(shield=True)

    async def run(self) -> None:
        """Sleeps until armed, then for the grace, then leaves unless disarmed meanwhile."""
        with self._scope:
            await self._armed.wait()
            with self._grace:
                await trio.sleep_forever()
            if self._leave is None:
                logger.warning("forward_thread_busy waiting=unbounded")
                return
            # Whoever was asked to stop may leave a load or a long step behind.
            is_crash = self._status is not ExitStatus.STOPPED
            level = logging.ERROR if is_crash else logging.WARNING
            logger.log(level, "forward_thread_stuck status=%d", self._status)
            await self._leave(self._status)

    def arm(self, grace_s: float, status: ExitStatus) -> None:
        """Starts the countdown."""
        self._status = status
        self._grace.deadline = trio.current_time() + grace_s
        self._armed.set()

    def shorten(self, grace_s: float) -> None:
        """Lets a countdown that has started end after ``grace_s`` at the latest."""
        if self._armed.is_set():
            self._grace.deadline = min(self._grace.deadline, trio.current_time() + grace_s)

    def disarm(self) -> None:
        """The forward thread has returned, or never started."""
        self._scope.cancel()
