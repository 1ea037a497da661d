"""Picks the next token of every row that samples, all rows at once.

Layer: model. The steps run in vLLM's order: raw log probabilities, edits of logits, then greedy
rows are done, then temperature, min_p, top_k, top_p and the draw. A step costs nothing unless a
row asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trio_engine.model.device import to_device
from trio_engine.model.draw import NUM_ROUNDS, draw_numbers
from trio_engine.model.logit_edits import LogitEdits
from trio_engine.model.logprobs import LogprobsGroup
from trio_engine.model.sampled_logprobs import SampledLogprobs
from trio_engine.model.sampling_rows import SamplingRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trio_engine.core.plan import NewRow, StepPlan
    from trio_engine.model.rows import Rows


# Sorting 49,152 weights takes a core 8 ms, finding the 1,024 largest 0.4 ms (measured, AVX2). A
# top_p nucleus is rarely wider.
_HEAD_SIZE = 1024


class SampledTokens(NamedTuple):
    """What sampling gave, on the device of the logits.

    Attributes:
        token_ids: ``[num_rows]`` int64.
        num_nans: ``[num_rows]`` int64, NaNs among each row's logits; None if known to be none.
        logprobs: of the rows that asked.
        is_lost: ``[num_rows]`` bool, rows of whose tokens the options left none; None if that was
            not asked, or cannot be.
    """

    token_ids: Tensor
    num_nans: Tensor | None
    logprobs: list[LogprobsGroup]
    is_lost: Tensor | None = None


class Sampler:
    """Samples by the options of the rows, which it keeps.

    Args:
        rows: the tokens so far.
        vocab_size: of the model.
        device: of the logits.

    Attributes:
        options: of the rows.
    """

    def __init__(self, rows: Rows, vocab_size: int, device: torch.device) -> None:
        self.options = SamplingRows(rows.num_tokens.size, vocab_size)
        self._rows = rows
        self._edits = LogitEdits(self.options, rows, device)
        self._logprobs = SampledLogprobs(self.options, device)

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's deltas; the rows have them already."""
        gone = np.flatnonzero(self.options.asks).tolist() if plan.reset else plan.finished_slots
        for slot in gone:
            self._drop(slot)
        for row in plan.new_rows:
            self._set_up(row)

    def sample(
        self,
        logits: Tensor,
        slots: NDArray[np.int64],
        last_tokens: Tensor | None = None,
        *,
        finds_lost: bool = False,
    ) -> SampledTokens:
        """Picks one token for each row, and takes note of it.

        NaN counts as minus infinity. A row without any finite logit is drawn evenly, or gives the
        first token if it is greedy.

        Args:
            logits: ``[num_rows, vocab]`` float32, contiguous; overwritten.
            slots: ``[num_rows]``: the rows' places.
            last_tokens: ``[max_num_seqs]``, on the device: the newest token of each row; None if
                the host knows them all.
            finds_lost: say which rows had no token left to pick.
        """
        num_nans = _drop_nans(logits)
        if not self.options.asks[slots].any():
            return SampledTokens(self._pick(logits, slots), num_nans, [])
        pending = self._logprobs.start(logits, slots)
        self._edits.apply(logits, slots, last_tokens)
        is_lost = logits.amax(dim=-1) == -torch.inf if finds_lost else None
        token_ids = self._pick(logits, slots)
        self._edits.note(slots, token_ids)
        logprobs = self._logprobs.finish(pending, token_ids)
        return SampledTokens(token_ids, num_nans, logprobs, is_lost)

    def _set_up(self, row: NewRow) -> None:
        self._drop(row.slot)
        self.options.set_up(row.slot, row.sampling_params)
        if self.options.asks[row.slot]:
            self._edits.set_up(row)
            self._logprobs.set_up(row)

    def _drop(self, slot: int) -> None:
        if self.options.asks[slot]:
            self.options.drop(slot)
            self._edits.drop(slot)
            self._logprobs.drop(slot)

    def _pick(self, logits: Tensor, slots: NDArray[np.int64]) -> Tensor:
        drawn = np.flatnonzero(self.options.temperature[slots])
        if drawn.size == slots.size:
            return self._draw(logits, slots)
        token_ids = logits.argmax(dim=-1)
        if drawn.size:
            indices = to_device(drawn, logits.device)
            some = logits.index_select(0, indices)
            token_ids.index_copy_(0, indices, self._draw(some, slots[drawn]))
        return token_ids

    def _draw(self, logits: Tensor, slots: NDArray[np.int64]) -> Tensor:
        options, device = self.options, logits.device
        weights = _weights(logits, to_device(options.temperature[slots], device))
        min_p, top_k, top_p = options.min_p[slots], options.top_k[slots], options.top_p[slots]
        if min_p.any():
            # The likeliest token weighs 1.
            weights.masked_fill_(weights < to_device(min_p, device)[:, None], 0)
        if (top_k < logits.shape[1]).any() or (top_p < 1).any():
            _cut_tail(weights, top_k, top_p)
        numbers = draw_numbers(options.seed[slots], self._rows.num_output(slots))
        return _draw_in_rounds(weights, to_device(numbers, device))


def _drop_nans(logits: Tensor) -> Tensor | None:
    # A maximum is NaN if anything is: one cheap pass where looking at its result costs no wait.
    if not logits.is_cuda and not logits.amax(dim=-1).isnan().any():
        return None
    is_nan = logits.isnan()
    logits.masked_fill_(is_nan, -torch.inf)
    return is_nan.sum(dim=-1)


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities as multiples of the largest, ``[num_rows, vocab]``."""
    # The largest is taken off before dividing, so that nothing overflows. Infinity minus itself
    # becomes 0: infinite logits share a row among them, as do the tokens of a row without any.
    logits.sub_(logits.amax(dim=-1, keepdim=True)).nan_to_num_(nan=0.0, neginf=-torch.inf)
    return logits.div_(temperature[:, None]).exp_()


def _cut_tail(weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> None:
    """Zeroes what lies outside a row's ``top_k`` likeliest, then outside its ``top_p`` mass.

    The token that reaches the mass is kept. Equally likely tokens stay or go together, so that
    the cut does not depend on how a device sorts.
    """
    vocab_size = weights.shape[1]
    smallest = None
    # Looking whether the head was enough would make a CUDA device wait.
    if not weights.is_cuda and ((top_k <= _HEAD_SIZE) | (top_k == vocab_size)).all():
        smallest = _smallest_kept(weights, min(_HEAD_SIZE, vocab_size), top_k, top_p)
    if smallest is None:
        smallest = _smallest_kept(weights, int(top_k.max()), top_k, top_p)
    assert smallest is not None
    weights.masked_fill_(weights < smallest, 0)


def _smallest_kept(
    weights: Tensor, width: int, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> Tensor | None:
    """The smallest weight that each row keeps, ``[num_rows, 1]``, from its ``width`` largest.

    Returns:
        None if some row's ``top_p`` mass needs more of them. Otherwise the same for every width.
    """
    device, vocab_size = weights.device, weights.shape[1]
    ordered = _largest(weights, width)
    has_top_k = to_device(top_k < vocab_size, device)[:, None]
    kth = ordered.gather(1, to_device(np.minimum(top_k, width) - 1, device)[:, None])
    smallest = kth.where(has_top_k, 0)
    if not (top_p < 1).any():
        return smallest
    share = to_device(top_p, device)[:, None]
    ordered = ordered.masked_fill(ordered < smallest, 0)
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    everything = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    mass = cumulative[:, -1:].where(has_top_k, everything) * share
    if width < vocab_size and not weights.is_cuda:
        needs_more = ~has_top_k & (share < 1) & (cumulative[:, -1:] < mass)
        if needs_more.any():
            return None
    num_kept = (cumulative - ordered < mass).sum(dim=-1, keepdim=True)
    nucleus = ordered.gather(1, (num_kept - 1).clamp_(min=0))
    # Rounding must not cut a row that did not ask.
    return torch.maximum(smallest, nucleus).where(share < 1, smallest)


def _largest(weights: Tensor, width: int) -> Tensor:
    if width == weights.shape[1]:
        return weights.sort(dim=-1, descending=True).values
    return weights.topk(width).values


def _draw_in_rounds(weights: Tensor, numbers: Tensor) -> Tensor:
    """Draws by weight: the vocabulary in equal groups of groups, ``numbers`` one for each round.

    The last bits of logits depend on a row's neighbours, and a draw must not. All tokens in one
    round have tens of thousands of borders, crowded among the unlikely ones, and about every
    thousandth number falls too near to one (measured); three short rounds have a hundred borders.
    """
    num_rows, vocab_size = weights.shape
    width = _group_width(vocab_size)
    groups = pad(weights, (0, width**NUM_ROUNDS - vocab_size))
    every_row = torch.arange(num_rows, device=weights.device)
    token_ids = torch.zeros_like(every_row)
    for number in numbers.unbind(dim=1):
        groups = groups.view(num_rows, width, -1)
        picked = _invert(groups.sum(dim=-1, dtype=torch.float64), number)
        token_ids = token_ids * width + picked
        groups = groups[every_row, picked]
    return token_ids


def _group_width(vocab_size: int) -> int:
    """How many groups a round has, so that the rounds together tell all tokens apart."""
    width: int = round(vocab_size ** (1 / NUM_ROUNDS))
    return width if width**NUM_ROUNDS >= vocab_size else width + 1


def _invert(masses: Tensor, number: Tensor) -> Tensor:
    """Inverts the cumulative masses ``[num_rows, num_groups]``; never picks an empty group."""
    cumulative = masses.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding must not reach the total, behind which there is nothing.
    targets = torch.minimum(total * number[:, None], torch.nextafter(total, total - 1))
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)
