"""Keeps rows from finishing a word that they must not say.

Layer: model. A word is a sequence of tokens; its last one is forbidden where the output ends in
the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trio_engine.model.device import to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from trio_engine.model.rows import Rows

_ANY = -1


class _Words(NamedTuple):
    """Words of one length: ``[n, length - 1]`` and ``[n]``."""

    beginnings: NDArray[np.int64]
    last_tokens: NDArray[np.int64]


class BadWords:
    """Words by slot.

    Args:
        rows: the outputs so far.
        vocab_size: words with an id outside are left out.
        device: of the logits.
    """

    def __init__(self, rows: Rows, vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device
        self._words: dict[int, list[_Words]] = {}

    def put(self, slot: int, words: Iterable[Sequence[int]]) -> None:
        """Keeps a row's words."""
        by_length: dict[int, list[Sequence[int]]] = {}
        for word in words:
            if word and min(word) >= 0 and max(word) < self._vocab_size:
                by_length.setdefault(len(word), []).append(word)
        arrays = [np.array(some, dtype=np.int64) for some in by_length.values()]
        self._words[slot] = [_Words(array[:, :-1], array[:, -1]) for array in arrays]

    def drop(self, slot: int) -> None:
        """Forgets a row's words, if it has any."""
        self._words.pop(slot, None)

    def apply(
        self,
        logits: Tensor,
        indices: NDArray[np.int64],
        slots: NDArray[np.int64],
        last_tokens: Tensor | None,
    ) -> None:
        """Masks, in place, each token that would finish a word.

        Args:
            logits: ``[num_rows, vocab]``, contiguous.
            indices: ``[n]``, rows of them that have words.
            slots: ``[n]``, their slots.
            last_tokens: ``[max_num_seqs]``, on the device: the newest token of each row, read
                where the host does not know it.
        """
        found = [
            (np.full(token_ids.size, index), token_ids, needed)
            for index, slot in zip(indices.tolist(), slots.tolist(), strict=True)
            for token_ids, needed in self._candidates(slot)
        ]
        if not found:
            return
        rows, token_ids, needed = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        values = torch.full((rows.size,), -torch.inf, device=self._device)
        if (needed != _ANY).any():
            assert last_tokens is not None
            row_slots = slots[np.searchsorted(indices, rows)]
            newest = last_tokens.index_select(0, to_device(row_slots, self._device))
            wanted = to_device(needed, self._device)
            values.masked_fill_((wanted != newest) & (wanted != _ANY), torch.inf)
        # The smaller one counts: words that end alike may differ in whether they are finished.
        places = to_device(rows * logits.shape[1] + token_ids, self._device)
        logits.view(-1).scatter_reduce_(0, places, values, "amin")

    def _candidates(self, slot: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Forbidden tokens, and which token must stand before each; ``_ANY`` if that is settled."""
        output = self._rows.settled_output(slot)
        has_unsettled = self._rows.num_tokens[slot] > self._rows.num_settled[slot]
        for words in self._words[slot]:
            beginnings, needed = words.beginnings, np.full(words.last_tokens.size, _ANY)
            if has_unsettled and beginnings.shape[1]:
                beginnings, needed = beginnings[:, :-1], beginnings[:, -1]
            length = beginnings.shape[1]
            if length > output.size:
                continue
            matches = (beginnings == output[output.size - length :]).all(axis=1)
            if matches.any():
                yield words.last_tokens[matches], needed[matches]
