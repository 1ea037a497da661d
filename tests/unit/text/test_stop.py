"""Stop strings against a plain reference, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from trio_engine.text.stop import StopChecker

# Two letters, so that stop strings overlap themselves and each other.
PIECES = st.lists(st.text(alphabet="ab", max_size=4), max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(
    pieces: list[str], stops: list[str], includes_stop: bool, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """What each piece lets out, and at last the rest, up to a stop."""
    checker = StopChecker(stops, includes_stop, min_tokens)
    texts = []
    for num_tokens, piece in enumerate(pieces, 1):
        text, stop = checker.append(piece, num_tokens)
        texts.append(text)
        if stop is not None:
            return texts, stop
    return [*texts, checker.finish()], None


def reference(
    pieces: list[str], stops: list[str], includes_stop: bool, min_tokens: int
) -> tuple[str, str | None]:
    """The stop string that is complete first, the longest of several, found by looking at all."""
    text = "".join(pieces)
    for end in range(len("".join(pieces[:min_tokens])) + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if includes_stop else end - len(stop)], stop
    return text, None


@given(pieces=PIECES, stops=STOPS, includes_stop=st.booleans(), min_tokens=st.integers(0, 6))
@example(pieces=["aab"], stops=["ab", "aab"], includes_stop=False, min_tokens=0)
@example(pieces=["aa", "ab"], stops=["aab"], includes_stop=False, min_tokens=1)
def test_the_first_complete_stop_string_ends_the_text(
    pieces: list[str], stops: list[str], includes_stop: bool, min_tokens: int
) -> None:
    texts, stop = run(pieces, stops, includes_stop, min_tokens)
    assert ("".join(texts), stop) == reference(pieces, stops, includes_stop, min_tokens)


@given(text=st.text(alphabet="ab", max_size=12), stops=STOPS, includes_stop=st.booleans())
def test_every_split_gives_the_same(text: str, stops: list[str], includes_stop: bool) -> None:
    expected = reference([text], stops, includes_stop, 0)
    for cut in range(len(text) + 1):
        texts, stop = run([text[:cut], text[cut:]], stops, includes_stop)
        assert ("".join(texts), stop) == expected


@given(pieces=PIECES, stops=STOPS)
def test_no_more_is_held_back_than_may_start_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    texts, stop = run(pieces, stops, includes_stop=False)
    for count in range(1, len(texts) if stop is None else len(texts) - 1):
        seen, sent = "".join(pieces[:count]), "".join(texts[:count])
        starts = (stop[:length] for stop in stops for length in range(1, len(stop)))
        longest = max((len(start) for start in starts if seen.endswith(start)), default=0)
        assert sent == seen[: len(seen) - longest]


def test_nothing_is_held_back_if_stops_are_included() -> None:
    assert run(["EN", "D!"], ["END"], includes_stop=True) == (["EN", "D"], "END")
    assert run(["EN", "T!"], ["END"], includes_stop=True) == (["EN", "T!", ""], None)


def test_a_false_start_is_let_out_with_what_shows_it_false() -> None:
    assert run(["x E", "N", "T"], ["END"], includes_stop=False) == (["x ", "", "ENT", ""], None)


@pytest.mark.known_fault(kind="lost-stop-rule")
def test_a_stop_string_within_min_tokens_does_not_count_but_one_that_ends_later_does() -> None:
    assert run(["END", "x"], ["END"], False, min_tokens=1) == (["END", "x", ""], None)
    assert run(["EN", "D"], ["END"], False, min_tokens=1) == (["", ""], "END")
    assert run(["abab", "ab"], ["abab"], False, min_tokens=1) == (["ab", ""], "abab")


def test_without_stop_strings_all_goes_through() -> None:
    assert run(["a", "b"], [], includes_stop=False) == (["a", "b", ""], None)


def test_a_long_stop_string_that_nearly_matches_throughout() -> None:
    stop = "a" * 2000 + "b"
    texts, found = run(["a"] * 4000 + ["b"], [stop], includes_stop=False)
    assert found == stop
    assert "".join(texts) == "a" * 2000
