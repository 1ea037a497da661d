"""The matchers of an executor's rows, by slot, and masks for those of a step.

Layer: structured. A step without such rows costs one look at an empty table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.structured.matcher import num_mask_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from trio_engine.core.plan import NewRow, RowMatcher, StepPlan


NOTHING_LEFT = "other options leave none of the tokens that may follow"


class GrammarRows:
    """Which rows follow a grammar, and how far they have come.

    Args:
        vocab_size: tokens of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = num_mask_words(vocab_size)
        self._matchers: dict[int, RowMatcher] = {}

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's changes of rows."""
        if plan.reset:
            self._matchers.clear()
        if self._matchers:
            for slot in plan.finished_slots:
                self._matchers.pop(slot, None)
        for row in plan.new_rows:
            self._set_up(row)

    def matchers_of(self, slots: Iterable[int]) -> dict[int, RowMatcher]:
        """The matchers of those of some rows that have one, by the row's place among them."""
        if not self._matchers:
            return {}
        found = ((place, self._matchers.get(slot)) for place, slot in enumerate(slots))
        return {place: matcher for place, matcher in found if matcher is not None}

    def masks_of(self, matchers: Iterable[RowMatcher], num_rows: int) -> NDArray[np.uint32]:
        """Which tokens may be next, ``[num_rows, num_mask_words]``, one row for each matcher."""
        masks = np.empty((num_rows, self._num_words), dtype=np.uint32)
        for words, matcher in zip(masks, matchers, strict=True):
            matcher.fill(words)
        return masks

    def _set_up(self, row: NewRow) -> None:
        if row.grammar is None:
            self._matchers.pop(row.slot, None)
            return
        params = row.sampling_params
        ends = {*(params.stop_token_ids or ())}
        if params.eos_token_id is not None:
            ends.add(params.eos_token_id)
        output = row.token_ids[row.num_prompt_tokens :]
        self._matchers[row.slot] = row.grammar.start(output, ends)


def accept_tokens(
    matchers: Mapping[int, RowMatcher],
    slots: Sequence[int],
    token_ids: Sequence[int],
    is_lost: Sequence[bool] | None = None,
) -> dict[int, str | None] | None:
    """Takes the tokens that a step's rows sampled.

    Args:
        matchers: by the row's place in the step, as they were when it sampled.
        slots: of the step's rows.
        token_ids: aligned with ``slots``.
        is_lost: the rows of which other options left no token that may follow.

    Returns:
        For ``StepResult.grammar_ends``.
    """
    ends: dict[int, str | None] = {}
    for place, matcher in matchers.items():
        if is_lost is not None and is_lost[place] and not matcher.is_over:
            ends[slots[place]] = NOTHING_LEFT
            continue
        matcher.accept(token_ids[place])
        if matcher.is_over:
            ends[slots[place]] = matcher.failure
    return ends or None
