"""Log probabilities of sampled tokens, for the rows that ask.

Layer: model. They are taken of the logits before anything changes these, and told of a token
that is known only afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trio_engine.model.device import to_device
from trio_engine.model.logprobs import (
    LogprobsGroup,
    TokenLogprobs,
    raw_logprobs,
    with_chosen,
    with_likeliest,
)
from trio_engine.model.sampling_rows import Asks
from trio_engine.sampling_params import logprobs_width

if TYPE_CHECKING:
    from trio_engine.core.plan import NewRow
    from trio_engine.model.sampling_rows import SamplingRows


class PendingLogprobs(NamedTuple):
    """Of rows whose token is not drawn yet.

    Attributes:
        indices: ``[n]``: the batch's rows that ask.
        slots: ``[n]``: their slots.
        logprobs: ``[n, vocab]``.
    """

    indices: NDArray[np.int64]
    slots: NDArray[np.int64]
    logprobs: Tensor


class SampledLogprobs:
    """How many, or which tokens, each slot wants to be told of beside the sampled one.

    Args:
        options: say which rows ask.
        device: of the logits.
    """

    def __init__(self, options: SamplingRows, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._num_others = np.zeros(options.asks.size, dtype=np.int64)
        self._chosen: dict[int, Tensor] = {}

    def set_up(self, row: NewRow) -> None:
        """Takes over what a new row asks."""
        params = row.sampling_params
        if params.num_logprobs is None:
            return
        self._num_others[row.slot] = (
            logprobs_width(params.num_logprobs, self._options.vocab_size) - 1
        )
        if params.logprob_token_ids:
            ids = np.array(params.logprob_token_ids, dtype=np.int64)
            self._chosen[row.slot] = to_device(ids, self._device)

    def drop(self, slot: int) -> None:
        """Forgets a row."""
        self._chosen.pop(slot, None)

    def start(self, logits: Tensor, slots: NDArray[np.int64]) -> PendingLogprobs | None:
        """Takes what will be needed of a batch's logits; None if no row asks."""
        indices = np.flatnonzero(self._options.asks[slots] & Asks.LOGPROBS)
        if not indices.size:
            return None
        some = logits
        if indices.size < slots.size:
            some = logits.index_select(0, to_device(indices, self._device))
        return PendingLogprobs(indices, slots[indices], raw_logprobs(some))

    def finish(self, pending: PendingLogprobs | None, token_ids: Tensor) -> list[LogprobsGroup]:
        """Looks up the tokens that the batch's rows got, ``[num_rows]`` int64.

        Rows of one width make a group, so that neither neighbours nor their order decide which of
        equally likely tokens a row is told of.
        """
        if pending is None:
            return []
        is_chosen = np.array([slot in self._chosen for slot in pending.slots.tolist()])
        keys = self._num_others[pending.slots] * 2 + is_chosen
        return [
            self._group(pending, np.flatnonzero(keys == key), token_ids)
            for key in np.unique(keys).tolist()
        ]

    def _group(
        self, pending: PendingLogprobs, places: NDArray[np.int64], token_ids: Tensor
    ) -> LogprobsGroup:
        indices, slots, logprobs = pending
        if places.size < indices.size:
            logprobs = logprobs.index_select(0, to_device(places, self._device))
        indices, slots = indices[places], slots[places]
        tokens = token_ids.index_select(0, to_device(indices, self._device))
        return LogprobsGroup(indices, self._look_up(logprobs, tokens, slots))

    def _look_up(self, logprobs: Tensor, tokens: Tensor, slots: NDArray[np.int64]) -> TokenLogprobs:
        first = int(slots[0])
        if first in self._chosen:
            chosen = torch.stack([self._chosen[slot] for slot in slots.tolist()])
            return with_chosen(logprobs, tokens, chosen)
        return with_likeliest(logprobs, tokens, int(self._num_others[first]))
