"""What sampling should do, one row at a time: transformers' processors, or plain loops in float64.

For a token that was drawn it also says how sure it was: by how little a logit or a draw would have
to differ for another token.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from trio_engine.model.draw import draw_numbers, seed_of_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trio_engine.sampling_params import SamplingParams

    Floats = NDArray[np.float64]


class Choice(NamedTuple):
    """The token that an oracle takes, and the distance to the nearest border of its decision.

    For a greedy row that is the gap between the two best logits; for others the smallest
    distance, in probability, of the draw to a token's border or of a token to a cut.
    """

    token_id: int
    margin: float


def edited_logits(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Floats:
    """Logits after masks, biases and penalties, as the options say."""
    scores = torch.tensor([list(logits)], dtype=torch.float64)
    if params.allowed_token_ids is not None:
        forbidden = set(range(len(logits))) - set(params.allowed_token_ids)
        scores[0, sorted(forbidden)] = -torch.inf
    if params.bad_words_token_ids:
        scores = _without_bad_words(scores, output, params.bad_words_token_ids)
    if params.min_tokens:
        scores = _without_stop_tokens(scores, len(output), params)
    for token_id, bias in (params.logit_bias or {}).items():
        scores[0, token_id] += bias
    if params.repetition_penalty != 1.0:
        process = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        scores = process(torch.tensor([[*prompt, *output]]), scores)
    edited: Floats = scores[0].numpy()
    for token_id in output:
        edited[token_id] -= params.frequency_penalty
    for token_id in set(output):
        edited[token_id] -= params.presence_penalty
    return edited


def _without_bad_words(
    scores: torch.Tensor, output: Sequence[int], words: list[list[int]]
) -> torch.Tensor:
    # It looks at no word that is longer than the text, though its beginning may be all of it: so
    # the text begins with a token that is in no word.
    stranger = next(i for i in range(scores.shape[1]) if not any(i in word for word in words))
    text = torch.tensor([[stranger, *output]])
    processed: torch.Tensor = NoBadWordsLogitsProcessor(words)(text, scores)
    return processed


def _without_stop_tokens(
    scores: torch.Tensor, num_output: int, params: SamplingParams
) -> torch.Tensor:
    stop_ids = set(params.all_stop_token_ids)
    if params.eos_token_id is not None:
        stop_ids.add(params.eos_token_id)
    if not stop_ids:
        return scores
    process = MinNewTokensLengthLogitsProcessor(0, params.min_tokens, sorted(stop_ids), "cpu")
    processed: torch.Tensor = process(torch.zeros((1, num_output), dtype=torch.int64), scores)
    return processed


def choose(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Choice:
    """The next token of a row that is greedy or has a seed."""
    edited = edited_logits(logits, prompt, output, params)
    if params.temperature == 0.0:
        best, second = np.sort(edited)[::-1][:2]
        return Choice(int(edited.argmax()), float(best - second))
    assert params.seed is not None
    seed = np.array([seed_of_row(params.seed)], dtype=np.uint64)
    probabilities, margin = cut_probabilities(edited, params)
    drawn = drawn_in_rounds(probabilities, draw_numbers(seed, np.array([len(output)]))[0])
    return Choice(drawn.token_id, min(margin, drawn.margin))


def drawn_in_rounds(probabilities: Floats, numbers: Floats) -> Choice:
    """Each number picks one of equally many parts of what is left of the vocabulary."""
    width = next(width for width in itertools.count(1) if width**3 >= len(probabilities))
    start, size, margin = 0, width**3, 1.0
    for number in numbers:
        size //= width
        starts = range(start, start + size * width, size)
        masses = [float(probabilities[first : first + size].sum()) for first in starts]
        borders = np.cumsum(masses) / sum(masses)
        margin = min(margin, float(np.abs(borders[:-1] - number).min()))
        start = starts[int((borders > number).argmax())]
    return Choice(start, margin)


def cut_probabilities(edited: Floats, params: SamplingParams) -> tuple[Floats, float]:
    """Temperature, then min_p, top_k and top_p; and how near a token was to being cut or kept."""
    weights = np.exp((edited - edited.max()) / params.temperature)
    margins = [1.0]
    if params.min_p:
        margins.append(float(np.abs(weights - params.min_p).min()))
        weights = np.where(weights >= params.min_p, weights, 0.0)
    order = np.argsort(-weights, kind="stable")
    if 0 < params.top_k < len(order):
        last, first_out = weights[order[params.top_k - 1]], weights[order[params.top_k]]
        margins.append(float(last - first_out) or 1.0)
        weights = np.where(weights >= last, weights, 0.0)
    if params.top_p < 1.0:
        shares = np.cumsum(weights[order]) / weights.sum()
        margins.append(float(np.abs(shares - params.top_p).min()))
        num_kept = int((shares < params.top_p).sum()) + 1
        smallest = weights[order[min(num_kept, len(order)) - 1]]
        weights = np.where(weights >= smallest, weights, 0.0)
    return weights / weights.sum(), min(margins)


def log_softmax(logits: Sequence[float]) -> Floats:
    """Log probabilities of plain logits."""
    largest = max(logits)
    total = math.fsum(math.exp(value - largest) for value in logits)
    return np.array(logits, dtype=np.float64) - largest - math.log(total)
