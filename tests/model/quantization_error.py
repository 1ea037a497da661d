"""How far a quantized built-in model is from itself in float32, over a fixed text.

The text are the prompts of ``greedy_oracle``: chat turns, code, lists, several languages. It is
computed in pieces of eight tokens, so that products go through the kernels that decoding uses, and
every token counts once, whatever comes before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.model.decoding import LogitsProbe, load_decoder
from tests.model.greedy_oracle import PROMPTS, TEXTS
from trio_engine.checkpoint import locate_model
from trio_engine.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.config import QuantizationName

_PIECE_TOKENS = 8


class QuantizationError(NamedTuple):
    """What quantizing changes.

    Attributes:
        divergence: of the distribution after a token, Kullback-Leibler from the model in float32,
            in nats, mean over all tokens.
        agreement: share of tokens after which the most probable one is the same.
        perplexity_ratio: of the text, over that in float32.
    """

    divergence: float
    agreement: float
    perplexity_ratio: float


class FixedText:
    """The text, and what the model in float32 makes of it.

    Args:
        num_sequences: of the twenty, the first.
    """

    def __init__(self, num_sequences: int = len(PROMPTS) + len(TEXTS)) -> None:
        tokenizer = load_tokenizer(locate_model("smollm2"))
        encoded = [tokenizer.encode(text) for text in (*PROMPTS, *TEXTS)[:num_sequences]]
        # After one token there is no next one whose probability could be looked at.
        self._sequences = [token_ids for token_ids in encoded if len(token_ids) > 1]
        self._expected = _log_probabilities(self._sequences, None)

    @property
    def num_tokens(self) -> int:
        return self._expected.shape[0]

    def error_of(self, quantization: QuantizationName) -> QuantizationError:
        """Computes the text with quantized weights."""
        expected, found = self._expected, _log_probabilities(self._sequences, quantization)
        divergence = (expected.exp() * (expected - found)).sum(-1).mean()
        agreement = (expected.argmax(-1) == found.argmax(-1)).float().mean()
        ratio = (self._surprise(found) - self._surprise(expected)).exp()
        return QuantizationError(float(divergence), float(agreement), float(ratio))

    def _surprise(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        """Of the text's tokens but each sequence's first, the mean."""
        parts = log_probabilities.split_with_sizes([len(ids) for ids in self._sequences])
        told = [
            part[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])
            for part, token_ids in zip(parts, self._sequences, strict=True)
        ]
        return -torch.cat(told).mean()


def _log_probabilities(
    sequences: Sequence[Sequence[int]], quantization: QuantizationName | None
) -> torch.Tensor:
    """``[num_tokens, vocab]`` after every token of all sequences."""
    decoder = load_decoder(locate_model("smollm2"), quantization=quantization)
    found = []
    for token_ids in sequences:
        probe = LogitsProbe(decoder)
        probe.add(0, token_ids)
        whole, rest = divmod(len(token_ids), _PIECE_TOKENS)
        chunks = [_PIECE_TOKENS] * whole + ([rest] if rest else [])
        found.append(probe.run(0, chunks).log_softmax(-1))
    return torch.cat(found)
