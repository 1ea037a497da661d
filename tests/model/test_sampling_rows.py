"""Options of a row become numbers that arrays can hold."""

from __future__ import annotations

from trio_engine.model.sampling_rows import SamplingRows
from trio_engine.sampling_params import SamplingParams


def test_more_min_tokens_than_an_array_can_hold_are_as_many_as_it_can() -> None:
    rows = SamplingRows(1, 40)
    rows.set_up(0, SamplingParams(max_tokens=None, min_tokens=2**64 - 1, stop_token_ids=[5]))
    assert rows.min_tokens[0] == 2**63 - 1
