"""Tokens for the structured rows of executors without a model: the nearest that is allowed.

No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.core.plan import NO_TOKEN
from trio_engine.structured.matcher import num_mask_words
from trio_engine.structured.rows import GrammarRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trio_engine.core.plan import RowMatcher, StepPlan, StepResult


class GrammarDraws:
    """Changes what an executor drew where a row's grammar does not allow it.

    Args:
        vocab_size: of the executor.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = GrammarRows(vocab_size)
        self._words = np.empty(num_mask_words(vocab_size), dtype=np.uint32)
        self._ends: dict[int, str | None] = {}

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's changes of rows."""
        self._rows.apply(plan)

    def draw(self, slot: int, token_id: int) -> int:
        """The token for a row that samples: ``token_id``, or the next one that is allowed."""
        matcher = self._rows.matchers_of([slot]).get(0)
        return token_id if matcher is None else self._draw(slot, matcher, token_id)

    def put_into(self, result: StepResult, plan: StepPlan) -> None:
        """Draws for all rows of a result that sampled, and adds the ends of grammars."""
        for place, matcher in self._rows.matchers_of(plan.slots).items():
            token_id = result.token_ids[place]
            if token_id != NO_TOKEN:
                result.token_ids[place] = self._draw(plan.slots[place], matcher, token_id)
        self.put_ends_into(result)

    def put_ends_into(self, result: StepResult) -> None:
        """Adds the grammars that have ended since the last call."""
        if self._ends:
            result.grammar_ends, self._ends = self._ends, {}

    def _draw(self, slot: int, matcher: RowMatcher, token_id: int) -> int:
        matcher.fill(self._words)
        token_id = next_allowed(self._words, token_id % self._vocab_size, self._vocab_size)
        matcher.accept(token_id)
        if matcher.is_over:
            self._ends[slot] = matcher.failure
        return token_id


def next_allowed(words: NDArray[np.uint32], token_id: int, vocab_size: int) -> int:
    """The first allowed token from ``token_id`` on, counted round the vocabulary.

    Args:
        words: a mask that allows some token.
        token_id: below ``vocab_size``.
        vocab_size: number of tokens; bits behind them mean nothing.
    """
    # Bytes, not words: looking for what is not zero in a large mask then takes no time at all.
    mask = words.astype("<u4", copy=False).tobytes()
    found = _first_from(mask, token_id)
    if found is None or found >= vocab_size:
        found = _first_from(mask, 0)
    assert found is not None, "a mask that allows nothing"
    return found


def _first_from(mask: bytes, token_id: int) -> int | None:
    place, bit = divmod(token_id, 8)
    value = mask[place] >> bit << bit
    if not value:
        rest = mask[place + 1 :].lstrip(b"\0")
        if not rest:
            return None
        place, value = len(mask) - len(rest), rest[0]
    return place * 8 + (value & -value).bit_length() - 1
