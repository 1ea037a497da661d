"""Finds stop strings in text that arrives in pieces.

Pure. One automaton (Knuth-Morris-Pratt) per stop string: the answer does not depend on how the
text was cut, and a character costs the same whatever came before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopResult(NamedTuple):
    """Text that can go out, and the stop string that ended it, if one did."""

    text: str
    stop: str | None


class StopChecker:
    """Watches one output for stop strings.

    The stop string that is complete first ends the output; of several that end together, the
    longest. Held back is only what may turn out to be the start of one, and nothing if stop
    strings are part of the output.

    Args:
        stop_strings: none of them empty.
        include_stop_str_in_output: whether the output ends with the stop string or before it.
        min_tokens: a stop string counts only if a later token completes it.

    Counterpart: ``check_stop_strings`` in ``vllm/v1/engine/detokenizer.py``, which takes the
    first in the caller's list, and holds back as much as the longest could need.
    """

    def __init__(
        self, stop_strings: Iterable[str], include_stop_str_in_output: bool, min_tokens: int
    ) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stop_strings)]
        self._includes_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""

    def append(self, text: str, num_output_tokens: int) -> StopResult:
        """Takes the text of the next token. Not to be called after a stop.

        Args:
            text: what the token adds to the output.
            num_output_tokens: tokens of the output so far, this one included.
        """
        may_stop = num_output_tokens > self._min_tokens
        for end, char in enumerate(text, 1):
            stop = self._advance(char)
            if stop is not None and may_stop:
                return StopResult(self._before_stop(text[:end], stop), stop)
        return StopResult(self._release(text), None)

    def finish(self) -> str:
        """Returns what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Moves every automaton on; returns the longest stop string that is now complete."""
        complete: str | None = None
        for matcher in self._matchers:
            if matcher.advance(char) and (complete is None or len(matcher.stop) > len(complete)):
                complete = matcher.stop
        return complete

    def _before_stop(self, text: str, stop: str) -> str:
        text = self.finish() + text
        return text if self._includes_stop else text.removesuffix(stop)

    def _release(self, text: str) -> str:
        if self._includes_stop:
            return text
        text = self._held + text
        cut = len(text) - max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = text[cut:]
        return text[:cut]


class _Matcher:
    """How much of one stop string the end of the text is."""

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def advance(self, char: str) -> bool:
        """Takes one character; True if it completes the stop string."""
        matched = _extend(self.stop, self._borders, self.num_matched, char)
        complete = matched == len(self.stop)
        self.num_matched = self._borders[-1] if complete else matched
        return complete


def _extend(stop: str, borders: list[int], matched: int, char: str) -> int:
    """The longest start of ``stop`` that ends in ``char``, given ``matched`` before it."""
    while matched and stop[matched] != char:
        matched = borders[matched - 1]
    return matched + 1 if stop[matched] == char else 0


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper start that is also its end."""
    borders = [0]
    for char in stop[1:]:
        borders.append(_extend(stop, borders, borders[-1], char))
    return borders
