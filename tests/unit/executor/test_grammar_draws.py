"""Executors without a model draw what grammars allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, strategies as st

from trio_engine.executor.grammar_draws import next_allowed
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.executor.null import NullExecutor
from trio_engine.structured.matcher import num_mask_words
from trio_engine.testing.check_grammar import check_grammar

if TYPE_CHECKING:
    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import StepResult

VOCAB_SIZE = 100


def test_the_null_executor_conforms() -> None:
    check_grammar(NullExecutor)


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_the_kv_checking_executor_conforms(launches_ahead: bool) -> None:
    check_grammar(
        lambda config: KVCheckingExecutor(config, launches_ahead=launches_ahead, vocab_size=300)
    )


class Deaf(NullExecutor):
    """Draws whatever it likes."""

    def collect(self) -> StepResult:
        result = super().collect()
        result.token_ids = [(token + 1) % 50_000 for token in result.token_ids]
        return result


class Silent(NullExecutor):
    """Does not tell that a grammar has ended."""

    def collect(self) -> StepResult:
        result = super().collect()
        result.grammar_ends = None
        return result


class Alarmed(NullExecutor):
    """Ends rows that have no grammar."""

    def collect(self) -> StepResult:
        result = super().collect()
        result.grammar_ends = {1: None}
        return result


@pytest.mark.parametrize(
    ("executor", "complaint"),
    [(Deaf, "at place 0"), (Silent, "after 4 tokens"), (Alarmed, "without a grammar")],
)
def test_an_executor_that_does_not_conform_is_noticed(
    executor: type[NullExecutor], complaint: str
) -> None:
    def make(config: EngineConfig) -> NullExecutor:
        return executor(config)

    with pytest.raises(AssertionError, match=complaint):
        check_grammar(make)


@given(
    allowed=st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1),
    beyond=st.sets(st.integers(VOCAB_SIZE, 127)),
    token_id=st.integers(0, VOCAB_SIZE - 1),
)
def test_the_next_allowed_token_is_found_round_the_vocabulary(
    allowed: set[int], beyond: set[int], token_id: int
) -> None:
    bits = np.zeros(num_mask_words(VOCAB_SIZE) * 32, dtype=np.uint8)
    bits[[*allowed, *beyond]] = 1
    words = np.packbits(bits, bitorder="little").view(np.uint32)
    expected = min(allowed, key=lambda other: (other - token_id) % VOCAB_SIZE)
    assert next_allowed(words, token_id, VOCAB_SIZE) == expected
