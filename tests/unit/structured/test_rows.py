"""The matchers of an executor's rows: which are there, their masks, and the ends of grammars."""

from __future__ import annotations

from typing import Any

import numpy as np

from trio_engine.core.plan import NewRow, StepPlan
from trio_engine.sampling_params import SamplingParams
from trio_engine.structured.matcher import num_mask_words
from trio_engine.structured.rows import NOTHING_LEFT, GrammarRows, accept_tokens
from trio_engine.testing.hashed_grammar import HashedGrammar

VOCAB_SIZE = 64
GRAMMAR = HashedGrammar(VOCAB_SIZE, 2)


def new_row(
    slot: int, *, output: tuple[int, ...] = (), free: bool = False, **params: Any
) -> NewRow:
    return NewRow(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=[1, 2, 3, *output],
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=[],
        sampling_params=SamplingParams(**params),
        grammar=None if free else GRAMMAR,
    )


def apply(rows: GrammarRows, *new: NewRow, **changes: Any) -> None:
    rows.apply(StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[], new_rows=[*new], **changes))


def allowed(words: np.ndarray[Any, np.dtype[np.uint32]]) -> set[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


def test_matchers_are_found_by_the_places_of_their_rows() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    assert rows.matchers_of([0, 1]) == {}
    apply(rows, new_row(4), new_row(5, free=True), new_row(6))
    assert list(rows.matchers_of([6, 5, 4, 3])) == [0, 2]


def test_a_row_that_starts_again_starts_after_its_output() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    first = min(GRAMMAR.may_follow([]))
    apply(rows, new_row(0), new_row(1, output=(first,)))
    matchers = rows.matchers_of([0, 1])
    masks = rows.masks_of(matchers.values(), len(matchers))
    assert masks.shape == (2, num_mask_words(VOCAB_SIZE))
    assert allowed(masks[0]) == GRAMMAR.may_follow([])
    assert allowed(masks[1]) == GRAMMAR.may_follow([first])


def test_rows_go_with_their_slots() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    apply(rows, new_row(0), new_row(1), new_row(2))
    before = rows.matchers_of([0])[0]
    apply(rows, new_row(0), finished_slots=[1, 0])
    assert list(rows.matchers_of([0, 1, 2])) == [0, 2]
    assert rows.matchers_of([0])[0] is not before
    apply(rows, new_row(0, free=True))
    assert list(rows.matchers_of([0, 1, 2])) == [2]
    apply(rows, new_row(1), reset=True, finished_slots=[7])
    assert list(rows.matchers_of([0, 1, 2])) == [1]


def test_any_token_that_ends_the_request_may_end_the_grammar() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    first = min(GRAMMAR.may_follow([]))
    second = min(GRAMMAR.may_follow([first]))
    output = (first, second)
    apply(rows, new_row(0, output=output, eos_token_id=5, stop_token_ids=[7, 9]))
    matchers = rows.matchers_of([0])
    assert allowed(rows.masks_of(matchers.values(), 1)[0]) == {5, 7, 9}
    assert matchers[0].may_only_end


def test_tokens_move_the_matchers_and_the_ends_are_told_by_slot() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    first = min(GRAMMAR.may_follow([]))
    second = min(GRAMMAR.may_follow([first]))
    forbidden = min(set(range(VOCAB_SIZE)) - GRAMMAR.may_follow([first]))
    apply(rows, new_row(3), new_row(4), new_row(5, free=True), new_row(6))
    slots = [3, 5, 4, 6]
    matchers = rows.matchers_of(slots)
    assert accept_tokens(matchers, slots, [first, 0, first, first]) is None
    assert accept_tokens(rows.matchers_of([3]), [3], [second]) == {3: None}
    is_lost = [False, False, False, True]
    ends = accept_tokens(matchers, slots, [0, 0, forbidden, second], is_lost)
    assert ends is not None
    assert ends[3] is None
    assert ends[4] is not None
    assert ends[6] == NOTHING_LEFT
