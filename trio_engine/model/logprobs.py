"""Log probabilities of tokens, those of the likeliest beside them, and ranks.

Layer: model. Raw: log-softmax of the logits as the model gave them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trio_engine.outputs import LogprobsLists

if TYPE_CHECKING:
    from collections.abc import Iterable


class TokenLogprobs(NamedTuple):
    """One row a token.

    Attributes:
        token_ids: ``[n, w]`` int32: the token itself, then others.
        logprobs: ``[n, w]`` float32.
        ranks: ``[n]`` int64: how many tokens are at least as likely as the token itself.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    def to_host(self) -> TokenLogprobs:
        """Starts the way to the host; there when all work launched so far is done."""
        return TokenLogprobs(*(part.to("cpu", non_blocking=True) for part in self))


class LogprobsGroup(NamedTuple):
    """Rows of a batch that want rows of one width.

    Attributes:
        indices: ``[n]``: the batch's rows.
        values: theirs.
    """

    indices: NDArray[np.int64]
    values: TokenLogprobs


def raw_logprobs(logits: Tensor) -> Tensor:
    """Log-softmax of ``[n, vocab]`` float32 logits, which stay; NaN becomes minus infinity."""
    return torch.log_softmax(logits, dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)


def with_likeliest(logprobs: Tensor, token_ids: Tensor, num_others: int) -> TokenLogprobs:
    """Tokens and the ``num_others`` likeliest beside each, in falling order.

    Args:
        logprobs: ``[n, vocab]``.
        token_ids: ``[n]`` int64.
        num_others: up to the vocabulary's size.
    """
    if not num_others:
        return _beside(logprobs, token_ids, token_ids.new_empty((token_ids.numel(), 0)))
    return _beside(logprobs, token_ids, logprobs.topk(num_others, dim=-1).indices)


def with_chosen(logprobs: Tensor, token_ids: Tensor, others: Tensor) -> TokenLogprobs:
    """Tokens and ``[n, w]`` int64 others, in the order given."""
    return _beside(logprobs, token_ids, others)


def lists_by_slot(
    groups: Iterable[LogprobsGroup], slots: NDArray[np.int64]
) -> dict[int, LogprobsLists]:
    """Rows on the host, one for each slot that asked; nothing keeps the batch's arrays."""
    found: dict[int, LogprobsLists] = {}
    for group in groups:
        token_ids, logprobs, ranks = (part.numpy() for part in group.values)
        for place, slot in enumerate(slots[group.indices].tolist()):
            row = slice(place, place + 1)
            found[slot] = LogprobsLists(
                token_ids[row].copy(), logprobs[row].copy(), ranks[row].copy()
            )
    return found


def _beside(logprobs: Tensor, token_ids: Tensor, others: Tensor) -> TokenLogprobs:
    ids = torch.cat([token_ids[:, None], others], dim=1)
    values = logprobs.gather(1, ids)
    ranks = (logprobs >= values[:, :1]).sum(dim=-1)
    return TokenLogprobs(ids.to(torch.int32), values, ranks)
