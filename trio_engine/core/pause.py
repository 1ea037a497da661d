"""Whether planning is stopped, and which of the executor's memory is given back.

Pure. ``EngineCore`` keeps it and obeys it; ``engine/sleep.py`` waits and sends the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trio_engine.errors import RequestError, UtilityError
from trio_engine.requests import PauseMode, SleepTag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SleepLevel = Literal[0, 1, 2]

RELEASED_AT: Mapping[SleepLevel, frozenset[SleepTag]] = {
    0: frozenset(),
    1: frozenset({SleepTag.KV_CACHE}),
    2: frozenset({SleepTag.KV_CACHE, SleepTag.WEIGHTS}),
}
"""What each level of sleep gives back. Level 0 is a pause and no more."""

MEMORY_TAGS = RELEASED_AT[2]


class PauseState:
    """A pause by its mode, and under it the memory that sleeps.

    Pauses are numbered, so that who waits for one to come to rest can tell whether it is still on:
    a newer pause changes the mode and leaves the older ones on, a resume ends all of them.

    Attributes:
        mode: of the newest pause; None if none is on.
        num_pauses: the number of the newest pause, on or not.
        asleep: memory that is given back, or about to be. While there is any a pause is on, but
            for a drain, which ends the pause and wakes nothing.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.num_pauses = 0
        self.asleep: frozenset[SleepTag] = frozenset()
        self._num_ended = 0
        self._why_ended = ""

    @property
    def is_on(self) -> bool:
        """Whether new requests wait."""
        return self.mode is not None

    @property
    def freezes_all(self) -> bool:
        """Whether no request may run, not even one that has started."""
        return self.mode is PauseMode.KEEP or bool(self.asleep)

    def begin(self, mode: PauseMode) -> int:
        """Starts a pause, or gives the one that is on another mode; returns its number."""
        self.mode = mode
        self.num_pauses += 1
        return self.num_pauses

    def resume(self) -> None:
        """Ends all pauses.

        Raises:
            RequestError: memory sleeps; to run anything would be to compute with nothing.
        """
        if self.asleep:
            tags = ", ".join(sorted(self.asleep))
            raise RequestError(f"the engine cannot resume while memory sleeps: {tags}")
        self.end("the engine was resumed before it had come to rest")

    def end(self, why: str) -> None:
        """Ends all pauses, whatever sleeps; ``why`` is what those hear who still wait for one."""
        self.mode = None
        self._num_ended = self.num_pauses
        self._why_ended = why

    def check_on(self, number: int) -> None:
        """Raises UtilityError, with the reason, if this pause has been ended."""
        if number <= self._num_ended:
            raise UtilityError(self._why_ended)

    def fall_asleep(self, tags: Iterable[SleepTag]) -> None:
        """Notes that memory is about to be given back."""
        self.asleep |= frozenset(tags)

    def wake_up(self, tags: Iterable[SleepTag]) -> None:
        """Notes that memory is there again, or was never given back."""
        self.asleep -= frozenset(tags)
