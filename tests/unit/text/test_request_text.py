"""One request's output: which tokens become text, and what ends it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import SamplingParams
from trio_engine.text.request_text import RequestText, TextDelta

if TYPE_CHECKING:
    from trio_engine.text.tokenizer import Tokenizer


def follow(tokenizer: Tokenizer | None, **options: Any) -> RequestText:
    return RequestText(tokenizer, [], SamplingParams(**options))


def test_text_flows_with_the_tokens(smollm2: Tokenizer) -> None:
    output = follow(smollm2)
    hello, world = smollm2.encode("Hello world")
    assert output.append([hello]) == TextDelta("Hello", None, 1)
    assert output.append([world], FinishReason.LENGTH) == TextDelta(" world", None, 1)


def test_an_unfinished_character_comes_out_at_the_end(smollm2: Tokenizer) -> None:
    output = follow(smollm2)
    assert output.append(smollm2.encode("😀")[:1]).text == ""
    assert output.append([], FinishReason.ABORT) == TextDelta("\ufffd", None, 0)


@pytest.mark.parametrize(
    ("reason", "included", "text"),
    [
        (FinishReason.STOP, False, "Hello"),
        (FinishReason.STOP, True, "Hello world"),
        (FinishReason.LENGTH, False, "Hello world"),
        (None, False, "Hello world"),
    ],
)
@pytest.mark.parametrize("stop", [None, ["never"]])
def test_a_stop_token_stays_out_of_the_text_unless_stops_are_included(
    smollm2: Tokenizer,
    reason: FinishReason | None,
    included: bool,
    text: str,
    stop: list[str] | None,
) -> None:
    output = follow(smollm2, include_stop_str_in_output=included, stop=stop)
    assert output.append(smollm2.encode("Hello world"), reason) == TextDelta(text, None, 2)


def test_a_stop_string_ends_the_output_and_drops_the_tokens_behind_it(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("one two three four")
    output = follow(smollm2, stop=" thr")
    assert output.append(token_ids) == TextDelta("one two", " thr", 3)
    assert output.append(token_ids, FinishReason.LENGTH) == TextDelta("", None, 0)


def test_a_stop_string_goes_before_the_engines_reason(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("one two three")
    output = follow(smollm2, stop="two", include_stop_str_in_output=True)
    assert output.append(token_ids, FinishReason.STOP) == TextDelta("one two", "two", 2)


def test_what_was_held_back_comes_out_at_the_end(smollm2: Tokenizer) -> None:
    output = follow(smollm2, stop=["Hello world!"])
    assert output.append(smollm2.encode("Hello world")).text == ""
    assert output.append([], FinishReason.LENGTH) == TextDelta("Hello world", None, 0)


def test_min_tokens_counts_tokens_over_all_deltas(smollm2: Tokenizer) -> None:
    (word,) = smollm2.encode(" two")
    output = follow(smollm2, stop=" two", min_tokens=3)
    assert output.append([word, word]) == TextDelta(" two two", None, 2)
    assert output.append([word, word, word]) == TextDelta(" two", " two", 2)


def test_nothing_follows_the_end(smollm2: Tokenizer) -> None:
    output = follow(smollm2)
    output.append([], FinishReason.ABORT)
    assert output.append(smollm2.encode("late")) == TextDelta("", None, 0)


def test_without_tokenizer_or_detokenize_there_is_no_text(smollm2: Tokenizer) -> None:
    for output in (follow(None), follow(smollm2, detokenize=False)):
        assert output.append([5, 6]) == TextDelta("", None, 2)
        assert output.append([7], FinishReason.STOP) == TextDelta("", None, 1)
        assert output.append([8]) == TextDelta("", None, 0)


@given(
    text=st.text(alphabet="ab é😀", max_size=30),
    stop=st.text(alphabet="ab é😀", min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_how_tokens_are_grouped_does_not_matter(
    smollm2: Tokenizer, text: str, stop: str, cuts: list[int]
) -> None:
    """Merged deltas give the text of single ones, and keep as many tokens."""
    token_ids = smollm2.encode(text)
    output = follow(smollm2, stop=stop)
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    deltas = [output.append(token_ids[a:b]) for a, b in pairwise(bounds)]
    deltas.append(output.append([], FinishReason.LENGTH))
    before, found, _ = text.partition(stop)
    assert "".join(delta.text for delta in deltas) == before
    assert any(delta.finished_by_stop_string == stop for delta in deltas) == bool(found)
    kept = sum(delta.num_tokens_kept for delta in deltas)
    assert stop in smollm2.decode(token_ids[:kept]) if found else kept == len(token_ids)
    assert not found or stop not in smollm2.decode(token_ids[: kept - 1])
