"""Stop strings that tokens cut at any byte, also within a character."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from tests.piece_tokenizer import make_piece_tokenizer
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import SamplingParams
from trio_engine.text.request_text import RequestText

BEFORE, BEHIND = "año EN é", "ß\nEND"
STOPS = ["END", "é", "\N{GRINNING FACE}!", "\nüber \N{CJK UNIFIED IDEOGRAPH-4E2D}:", "ENE\u0301ND"]
"""Of one to four bytes a character; the text before holds beginnings of some."""


def cut_everywhere(data: bytes, num_cuts: int) -> list[list[bytes]]:
    """All ways to cut in so many places."""
    places = combinations(range(1, len(data)), num_cuts)
    return [[data[a:b] for a, b in pairwise((0, *cuts, len(data)))] for cuts in places]


def first_complete(pieces: list[bytes], stop: str) -> int:
    """How many tokens it takes until the text has the stop string whole."""
    return next(n for n in range(1, len(pieces) + 1) if stop.encode() in b"".join(pieces[:n]))


@pytest.mark.parametrize("includes_stop", [False, True])
@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_is_found_wherever_its_tokens_are_cut(stop: str, includes_stop: bool) -> None:
    """By one cut, by two, and with a token for each byte; in one delta and in many."""
    before = BEFORE.replace(stop, "")
    whole = (before + stop + BEHIND).encode()
    cuts = [*cut_everywhere(whole, 1), *cut_everywhere(whole, 2), [bytes([byte]) for byte in whole]]
    tokenizer, token_of = make_piece_tokenizer(piece for pieces in cuts for piece in pieces)
    params = SamplingParams(stop=stop, include_stop_str_in_output=includes_stop)
    for pieces in cuts:
        token_ids = [token_of[piece] for piece in pieces]
        at_once = RequestText(tokenizer, [], params)
        one_by_one = RequestText(tokenizer, [], params)
        deltas = [one_by_one.append([token_id]) for token_id in token_ids]
        for some in ([at_once.append(token_ids)], deltas):
            assert "".join(delta.text for delta in some) == before + stop * includes_stop
            assert [delta.finished_by_stop_string for delta in some].count(stop) == 1
            kept = sum(delta.num_tokens_kept for delta in some)
            assert kept == first_complete(pieces, stop)


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_without_its_last_byte_stops_nothing(stop: str) -> None:
    data = stop.encode()[:-1] + b"x"
    tokenizer, token_of = make_piece_tokenizer(bytes([byte]) for byte in data)
    output = RequestText(tokenizer, [], SamplingParams(stop=stop))
    deltas = [output.append([token_of[bytes([byte])]]) for byte in data]
    deltas.append(output.append([], FinishReason.LENGTH))
    assert "".join(delta.text for delta in deltas) == data.decode(errors="replace")
    assert all(delta.finished_by_stop_string is None for delta in deltas)
