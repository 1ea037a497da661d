"""Words of the outputs that people and other programs read."""

from __future__ import annotations

import msgspec
import pytest

from trio_engine.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.ABORT, "abort"),
        (FinishReason.ERROR, "error"),
        (FinishReason.REPETITION, "repetition"),
    ],
)
def test_a_finish_reason_reads_as_in_openai_style_answers(reason: FinishReason, word: str) -> None:
    assert str(reason) == f"{reason}" == word


def test_finish_reasons_are_numbers_on_the_wire() -> None:
    assert [int(reason) for reason in FinishReason] == [0, 1, 2, 3, 4]
    assert msgspec.msgpack.encode(FinishReason.LENGTH) == b"\x01"


def test_defaults_are_not_shared_between_messages() -> None:
    first, second = EngineCoreOutputs(), EngineCoreOutputs()
    first.outputs.append(EngineCoreOutput("a", []))
    assert second.outputs == []
    one, other = SchedulerStats(), SchedulerStats()
    one.prefix_cache_stats.hits = 5
    assert other.prefix_cache_stats.hits == 0
