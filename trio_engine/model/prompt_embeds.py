"""Embeddings that stand in prompts in place of tokens, by slot.

Layer: model. They are kept until their rows have computed them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trio_engine.errors import RequestStepError
from trio_engine.model.device import to_device

if TYPE_CHECKING:
    from trio_engine.core.plan import NewRow, StepPlan
    from trio_engine.model.batch import StepLayout
    from trio_engine.model.rows import Rows


class BatchEmbeds(NamedTuple):
    """Embeddings of one step.

    Attributes:
        indices: ``[n]`` int64: the batch's tokens that are none.
        values: ``[n, hidden]``: what stands there.
    """

    indices: Tensor
    values: Tensor


class _Embeds(NamedTuple):
    """Those of one prompt: ``[num_prompt, hidden]``, and where they count: ``[num_prompt]``."""

    values: Tensor
    is_embedded: NDArray[np.bool_]


class PromptEmbeds:
    """The rows whose prompts are embeddings, in whole or in part, and not yet computed.

    Args:
        rows: say how far each is.
        hidden_size: of an embedding.
        device: of the model.
        dtype: of the model's weights.
    """

    def __init__(
        self, rows: Rows, hidden_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._rows = rows
        self._hidden_size = hidden_size
        self._device = device
        self._dtype = dtype
        self._embeds: dict[int, _Embeds] = {}

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's deltas.

        Raises:
            RequestStepError: a new row's embeddings are not of its prompt's length or the model's
                size.
        """
        if plan.reset:
            self._embeds.clear()
        for slot in plan.finished_slots:
            self._embeds.pop(slot, None)
        for row in plan.new_rows:
            self._embeds.pop(row.slot, None)
            if row.prompt_embeds is not None:
                self._embeds[row.slot] = self._read(row)

    def of(self, layout: StepLayout) -> BatchEmbeds | None:
        """Those that a step computes; its rows are not yet said to be computed."""
        if not self._embeds:
            return None
        found = [
            self._of_row(slot, int(layout.starts[index]), int(layout.counts[index]))
            for index, slot in enumerate(layout.slots.tolist())
            if slot in self._embeds
        ]
        if not found:
            return None
        indices = to_device(np.concatenate([some for some, _ in found]), self._device)
        return BatchEmbeds(indices, torch.cat([values for _, values in found]))

    def _of_row(self, slot: int, start: int, count: int) -> tuple[NDArray[np.int64], Tensor]:
        embeds, first = self._embeds[slot], int(self._rows.num_computed[slot])
        places = np.flatnonzero(embeds.is_embedded[first : first + count])
        if first + count >= embeds.is_embedded.size:
            del self._embeds[slot]
        positions = to_device(first + places, self._device)
        return start + places, embeds.values.index_select(0, positions)

    def _read(self, row: NewRow) -> _Embeds:
        assert row.prompt_embeds is not None
        wanted, shape = (row.num_prompt_tokens, self._hidden_size), row.prompt_embeds.shape
        if shape != wanted:
            # Admission refuses them; here they would end the engine.
            message = f"request {row.request_id}: prompt_embeds {list(shape)}, not {list(wanted)}"
            raise RequestStepError(message, slots=[row.slot])
        values = row.prompt_embeds.to_numpy()
        # A copy: the wire's buffer is not ours to keep, and not writable.
        values = np.array(values, dtype=np.float32)
        is_embedded = np.ones(row.num_prompt_tokens, dtype=np.bool_)
        if row.prompt_is_token_ids is not None:
            is_embedded = ~np.array(row.prompt_is_token_ids, dtype=np.bool_)
        return _Embeds(to_device(values, self._device).to(self._dtype), is_embedded)
