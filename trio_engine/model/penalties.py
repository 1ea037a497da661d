"""Penalties for tokens that a row has had already.

Layer: model. What a row has had is counted on the device, so that the count includes a token that
the host has not heard of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trio_engine.model.device import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from trio_engine.core.plan import NewRow
    from trio_engine.model.sampling_rows import SamplingRows

# One word a token: this bit if the prompt has it, and how often the output has it.
_IN_PROMPT = 1 << 30


class Penalties:
    """Token counts of the rows that are penalized.

    A table of ``[places, vocab]`` int32 grows with the number of such rows and goes with the last
    of them.

    Args:
        rows: the penalties by slot.
        device: of logits and counts.
    """

    def __init__(self, rows: SamplingRows, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._table: Tensor | None = None
        self._places: dict[int, int] = {}
        self._free_places: list[int] = []

    def put(self, row: NewRow) -> None:
        """Counts what a new row has had."""
        place = self._free_places.pop() if self._free_places else self._grow()
        self._places[row.slot] = place
        assert self._table is not None
        prompt = self._to_device(_prompt_tokens(row))
        output = self._to_device(row.token_ids[row.num_prompt_tokens :])
        counts = self._table[place].zero_().index_fill_(0, prompt, _IN_PROMPT)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def drop(self, slot: int) -> None:
        """Forgets a row, if it has penalties."""
        place = self._places.pop(slot, None)
        if place is not None:
            self._free_places.append(place)
        if not self._places:
            self._table, self._free_places = None, []

    def apply(self, logits: Tensor, indices: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Changes logits in place: repetition, then frequency, then presence.

        Args:
            logits: ``[num_rows, vocab]``.
            indices: ``[n]``, rows of them that have penalties, rising.
            slots: ``[n]``, their slots.
        """
        assert self._table is not None
        counts = self._table.index_select(0, self._places_of(slots))
        if indices.size == logits.shape[0]:
            self._penalize(logits, counts, slots)
            return
        places = to_device(indices, self._device)
        some = logits.index_select(0, places)
        self._penalize(some, counts, slots)
        logits.index_copy_(0, places, some)

    def note(self, slots: NDArray[np.int64], token_ids: Tensor) -> None:
        """Counts the tokens, one a row, that rows with penalties got."""
        assert self._table is not None
        places = self._places_of(slots) * self._table.shape[1] + token_ids
        ones = torch.ones_like(places, dtype=torch.int32)
        self._table.view(-1).index_add_(0, places, ones)

    def _penalize(self, logits: Tensor, counts: Tensor, slots: NDArray[np.int64]) -> None:
        repetition = self._rows.repetition_penalty[slots]
        frequency = self._rows.frequency_penalty[slots]
        presence = self._rows.presence_penalty[slots]
        if (repetition != 1).any():
            factors = self._column(repetition).where(counts != 0, 1.0)
            logits.mul_(factors.where(logits <= 0, 1 / factors))
        if frequency.any() or presence.any():
            counts.bitwise_and_(_IN_PROMPT - 1)
            logits.sub_(counts * self._column(frequency))
            logits.sub_((counts > 0) * self._column(presence))

    def _to_device(self, token_ids: list[int]) -> Tensor:
        return to_device(np.array(token_ids, dtype=np.int64), self._device)

    def _column(self, values: NDArray[np.float32]) -> Tensor:
        return to_device(values, self._device)[:, None]

    def _places_of(self, slots: NDArray[np.int64]) -> Tensor:
        places = np.array([self._places[slot] for slot in slots.tolist()], dtype=np.int64)
        return to_device(places, self._device)

    def _grow(self) -> int:
        """Doubles the table; the first of the new places."""
        size = 0 if self._table is None else self._table.shape[0]
        more = torch.zeros(
            (max(1, size), self._rows.vocab_size), dtype=torch.int32, device=self._device
        )
        self._table = more if self._table is None else torch.cat([self._table, more])
        self._free_places.extend(range(self._table.shape[0] - 1, size, -1))
        return size


def _prompt_tokens(row: NewRow) -> list[int]:
    """The tokens in a row's prompt; where an embedding stands there is none."""
    prompt = row.token_ids[: row.num_prompt_tokens]
    if row.prompt_embeds is None:
        return prompt
    is_token = row.prompt_is_token_ids or [False] * len(prompt)
    return [token_id for token_id, is_id in zip(prompt, is_token, strict=True) if is_id]
