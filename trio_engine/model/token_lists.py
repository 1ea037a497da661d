"""Lists of tokens that belong to some slots: kept on the device, joined for a batch.

Layer: model. For options that name a few tokens; rows without them cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trio_engine.model.device import to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


_LARGEST = float(np.finfo(np.float32).max)


class TokenPlaces(NamedTuple):
    """Places in logits ``[num_rows, vocab]``, with a number for each.

    Attributes:
        rows: ``[n]`` int64.
        token_ids: ``[n]`` int64.
        values: ``[n]`` float32.
    """

    rows: Tensor
    token_ids: Tensor
    values: Tensor


class TokenLists:
    """Token ids by slot, each with a number.

    Args:
        vocab_size: ids outside are left out: they would land in another row.
        device: of the lists.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._lists: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, slot: int, values: Iterable[tuple[int, float]]) -> None:
        """Keeps a row's tokens and their numbers, brought into float32's range."""
        pairs = [pair for pair in values if 0 <= pair[0] < self._vocab_size]
        ids = np.array([token_id for token_id, _ in pairs], dtype=np.int64)
        numbers = np.clip([number for _, number in pairs], -_LARGEST, _LARGEST).astype(np.float32)
        self._lists[slot] = (to_device(ids, self._device), to_device(numbers, self._device))

    def drop(self, slot: int) -> None:
        """Forgets a row's tokens, if it has any."""
        self._lists.pop(slot, None)

    def of(self, indices: NDArray[np.int64], slots: NDArray[np.int64]) -> TokenPlaces:
        """Joins the lists of rows.

        Args:
            indices: ``[n]``, the rows' places in the batch.
            slots: ``[n]``, all of which have a list.
        """
        lists: Sequence[tuple[Tensor, Tensor]] = [self._lists[slot] for slot in slots.tolist()]
        rows = np.repeat(indices, [len(ids) for ids, _ in lists])
        ids, values = (torch.cat(parts) for parts in zip(*lists, strict=True))
        return TokenPlaces(to_device(rows, self._device), ids, values)
