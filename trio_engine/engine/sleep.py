"""Pausing, sleeping and waking up, as utility calls: waits and commands around ``PauseState``.

Engine. Handlers decide when their message comes, so that whatever came before or after it on that
socket is before or after the pause; the coroutine that each returns waits for the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trio_engine.core.pause import MEMORY_TAGS, RELEASED_AT, SleepLevel
from trio_engine.requests import PauseMode, SleepTag

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from trio_engine.engine.step_loop import StepLoop

SLEEP_COMMAND = "sleep"
WAKE_UP_COMMAND = "wake_up"

Done = Awaitable[None]


class SleepCalls:
    """The utility methods that stop and start planning, and give memory back and take it again.

    ``sleep`` and ``wake_up`` take effect one after the other, in the order in which they came.
    ``resume`` takes effect at once; a pause or a sleep that has not come to rest by then fails.

    Args:
        loop: whose core is paused.

    Counterpart: ``vllm/v1/engine/core.py`` ``EngineCore.sleep`` and ``wake_up``. There a resume
    leaves the pause that it overtakes pending, to put to sleep an engine that runs again.
    """

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._core = loop.core
        self._queue = _Queue()

    def pause(self, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> Done:
        """Done when nothing runs any more. Fails if it is resumed before."""
        return self._finish_pause(self._core.pause(mode), clear_cache)

    def resume(self) -> None:
        """Ends a pause; RequestError while memory sleeps."""
        self._core.resume()

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = PauseMode.ABORT) -> Done:
        """Pauses, then gives back what the level says and still is there."""
        number = self._core.pause(mode)
        return self._finish_sleep(number, RELEASED_AT[level], self._queue.enter())

    def wake_up(self, tags: list[SleepTag] | None = None) -> Done:
        """Takes memory again, all of it by default, and resumes if nothing sleeps then.

        So scheduling, named or not, wakes with the last of the memory. A pause that comes after
        this call stays on.
        """
        number = self._core.pause_state.num_pauses
        wanted = MEMORY_TAGS if tags is None else frozenset(tags)
        return self._finish_wake_up(number, wanted, self._queue.enter())

    def is_sleeping(self) -> bool:
        """Whether a pause is on or memory sleeps."""
        return self._core.pause_state.is_on or bool(self._core.pause_state.asleep)

    async def _finish_pause(self, number: int, clear_cache: bool) -> None:
        await self._loop.wait_paused(number)
        # No checkpoint from here to the answer: the pause is still on and nothing is in flight.
        if clear_cache:
            self._core.reset_prefix_cache(reset_running=True)
            self._loop.ring()  # for the gauges

    async def _finish_sleep(
        self, number: int, to_release: frozenset[SleepTag], turn: _Turn
    ) -> None:
        state = self._core.pause_state
        async with turn.wait():
            await self._loop.wait_paused(number)
            tags = to_release - state.asleep
            if not tags:
                return
            # No checkpoint since the pause came to rest; from here on it is sleep that lasts.
            self._core.fall_asleep(tags)
            try:
                await self._loop.run_command(SLEEP_COMMAND, sorted(tags))
            except Exception:
                state.wake_up(tags)
                raise

    async def _finish_wake_up(self, number: int, wanted: frozenset[SleepTag], turn: _Turn) -> None:
        state = self._core.pause_state
        async with turn.wait():
            tags = wanted & state.asleep
            if tags:
                await self._loop.run_command(WAKE_UP_COMMAND, sorted(tags))
                state.wake_up(tags)
            if state.num_pauses == number and not state.asleep:
                self._core.resume()
                self._loop.ring()


class _Queue:
    """Who entered first goes first, whichever task gets to run first."""

    def __init__(self) -> None:
        self._last: _Turn | None = None

    def enter(self) -> _Turn:
        """A turn behind all those entered before."""
        self._last = _Turn(self._last)
        return self._last


class _Turn:
    """A place in a queue. ``wait`` must be entered, or those behind it wait for ever."""

    def __init__(self, before: _Turn | None) -> None:
        self._before = before
        self._over = trio.Event()

    @asynccontextmanager
    async def wait(self) -> AsyncGenerator[None]:
        """Waits for the turns before this one, which is over with the block."""
        try:
            if self._before is not None:
                await self._before._over.wait()
                self._before = None  # or every turn there ever was stays in memory
            yield
        finally:
            self._over.set()
