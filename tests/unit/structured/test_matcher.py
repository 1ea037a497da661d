"""A row's way through its grammar: what may follow, what ends it, and starting again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.unit.structured.grammar_parts import (
    END,
    VOCAB_SIZE,
    allowed,
    allowed_text,
    compile_grammar,
    start,
    tokens_of,
)
from trio_engine.structured import matcher as matcher_module
from trio_engine.structured.matcher import explain, num_mask_words

if TYPE_CHECKING:
    from trio_engine.structured.matcher import Matcher

EVERYTHING = set(range(VOCAB_SIZE))


def accept(matcher: Matcher, text: str) -> None:
    for token in tokens_of(text):
        matcher.accept(token)


def test_only_what_the_grammar_allows_may_follow() -> None:
    matcher = start(regex="a[0-9]b")
    assert allowed_text(matcher) == "a"
    accept(matcher, "a")
    assert allowed_text(matcher) == "0123456789"
    assert END not in allowed(matcher)


def test_end_tokens_may_follow_where_the_grammar_may_end() -> None:
    matcher = start(regex="a+", ends=(END, 299), output="a")
    assert allowed(matcher) == {*tokens_of("a"), END, 299}
    assert not matcher.may_only_end
    matcher.accept(299)
    assert (matcher.is_over, matcher.failure) == (True, None)


def test_a_grammar_that_has_ended_leaves_nothing_but_end_tokens() -> None:
    matcher = start(regex="ab", output="ab")
    assert not matcher.is_over
    assert allowed(matcher) == {END}
    assert matcher.may_only_end


def test_without_end_tokens_it_is_over_with_the_last_token() -> None:
    matcher = start(regex="ab", ends=())
    accept(matcher, "a")
    assert not matcher.is_over
    accept(matcher, "b")
    assert (matcher.is_over, matcher.failure) == (True, None)


def test_without_end_tokens_it_goes_on_while_something_can_follow() -> None:
    matcher = start(regex="ab?", ends=())
    accept(matcher, "a")
    assert not matcher.is_over
    assert allowed_text(matcher) == "b"
    accept(matcher, "b")
    assert matcher.is_over


def test_an_end_token_that_can_go_on_goes_on() -> None:
    """A stop token may be text of the grammar; whether it ends the request is the core's affair."""
    newline = tokens_of("\n")[0]
    matcher = start(regex="a(\nb)?", ends=(END, newline), output="a")
    matcher.accept(newline)
    assert not matcher.is_over
    assert allowed_text(matcher) == "b"


def test_an_end_token_that_is_text_ends_where_the_grammar_has_no_use_for_it() -> None:
    newline = tokens_of("\n")[0]
    matcher = start(regex="a", ends=(newline,), output="a")
    assert allowed(matcher) == {newline}
    matcher.accept(newline)
    assert (matcher.is_over, matcher.failure) == (True, None)


def test_special_tokens_and_ids_without_a_token_are_no_text() -> None:
    matcher = start(regex="(.|\n)*", ends=())
    assert allowed(matcher).isdisjoint({END, *range(257, VOCAB_SIZE)})


def test_a_row_that_is_over_allows_everything_and_stays_over() -> None:
    matcher = start(regex="a", output="a")
    matcher.accept(END)
    assert allowed(matcher) == EVERYTHING
    matcher.accept(7)
    assert (matcher.is_over, matcher.failure) == (True, None)


def test_a_token_against_the_grammar_is_a_failure() -> None:
    matcher = start(regex="abc")
    accept(matcher, "x")
    assert matcher.is_over
    assert matcher.failure is not None
    assert f"does not allow token {tokens_of('x')[0]}" in matcher.failure
    assert allowed(matcher) == EVERYTHING


def test_an_end_token_where_the_grammar_may_not_end_is_a_failure() -> None:
    matcher = start(regex="abc", output="a")
    matcher.accept(END)
    assert matcher.failure is not None


def test_a_grammar_that_allows_no_token_is_a_failure() -> None:
    matcher = start(grammar="start: start")
    assert allowed(matcher) == EVERYTHING
    assert matcher.failure == "the grammar cannot be fulfilled: no token may follow"


def test_a_grammar_of_nothing_is_over_by_an_end_token_or_a_failure() -> None:
    assert allowed(start(regex="(a|b){0}")) == {END}
    matcher = start(regex="(a|b){0}", ends=())
    assert allowed(matcher) == EVERYTHING
    assert matcher.failure == "the grammar allows no token"


def test_a_grammar_that_grows_too_complex_is_a_failure() -> None:
    matcher = start(regex="(((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100}")
    for _ in range(50):
        allowed(matcher)
        accept(matcher, "a")
        if matcher.failure is not None:
            break
    assert matcher.failure is not None
    assert "<non-verbose/>" not in matcher.failure


def test_a_mask_that_takes_too_long_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_module, "MAX_MASK_S", -1.0)
    matcher = start(regex="a")
    assert allowed(matcher) == EVERYTHING
    assert matcher.failure == "finding the tokens that may follow takes more than -1.0 s"


@pytest.mark.parametrize("vocab_size", [287, 288, 289, 300, 319, 320])
def test_masks_have_room_for_all_tokens_and_one_bit_more(vocab_size: int) -> None:
    assert num_mask_words(vocab_size) * 32 > vocab_size


def test_two_rows_of_one_grammar_do_not_meet() -> None:
    grammar = compile_grammar(regex="ab|cd")
    first, second = grammar.start([], [END]), grammar.start([], [END])
    accept(first, "a")
    assert allowed_text(second) == "ac"
    accept(second, "c")
    assert (allowed_text(first), allowed_text(second)) == ("b", "d")
    third = grammar.start(tokens_of("c"), [END])
    assert allowed_text(third) == "d"


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 3},
        "b": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 50}},
        "c": {"enum": ["x", "xy", None]},
    },
    "required": ["a"],
}


@given(seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 40))
def test_a_row_that_starts_again_allows_what_it_would_have(seed: int, num_steps: int) -> None:
    """After a preemption or a failed step, from the tokens alone."""
    grammar = compile_grammar(json=SCHEMA)
    rng = np.random.default_rng(seed)
    matcher = grammar.start([], [END])
    output: list[int] = []
    for _ in range(num_steps):
        may_follow = sorted(allowed(matcher) - {END}) or [END]
        again = grammar.start(output, [END])
        assert allowed(again) == allowed(matcher)
        assert again.may_only_end == matcher.may_only_end
        output.append(int(rng.choice(may_follow)))
        matcher.accept(output[-1])
        assert matcher.failure is None
        if matcher.is_over:
            break
    assert grammar.start(output, [END]).is_over == matcher.is_over


def test_errors_of_the_library_are_made_short() -> None:
    assert explain("NoExtensionBias\n<non-verbose/>").startswith("the grammar cannot be fulfilled")
    assert explain("lexer error: too many states\n<non-verbose/>") == "lexer error: too many states"
    assert len(explain("x" * 10_000)) < 400
