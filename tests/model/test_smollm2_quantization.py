"""The built-in model with quantized weights stays near itself: measured, with a margin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.model.decoding import NEEDS_INT4
from tests.model.quantization_error import FixedText, QuantizationError

if TYPE_CHECKING:
    from trio_engine.config import QuantizationName

pytestmark = pytest.mark.slow

LIMITS: dict[QuantizationName, QuantizationError] = {
    "int8": QuantizationError(divergence=0.01, agreement=0.9, perplexity_ratio=1.03),
    "int4": QuantizationError(divergence=0.01, agreement=0.9, perplexity_ratio=1.03),
}


NUM_SEQUENCES = 10


@pytest.fixture(scope="module")
def text() -> FixedText:
    return FixedText(NUM_SEQUENCES)


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=NEEDS_INT4)])
def test_distributions_and_greedy_tokens_stay_near(
    quantization: QuantizationName, text: FixedText
) -> None:
    """The file's own weights are of four bits in groups of 32, which int4 finds again."""
    error, limit = text.error_of(quantization), LIMITS[quantization]
    assert text.num_tokens > 200
    assert 0 < error.divergence < limit.divergence
    assert limit.agreement < error.agreement < 1
    assert error.perplexity_ratio < limit.perplexity_ratio
