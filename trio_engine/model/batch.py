"""Cuts the batch of one step out of the persistent rows.

Layer: model. All of it is array work on the host; the results go to the device without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trio_engine.model.attention_layout import RowLayout, attention_view
from trio_engine.model.device import to_device

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from trio_engine.model.attention import AttentionView
    from trio_engine.model.config import ModelConfig
    from trio_engine.model.decode_graphs import GraphSize
    from trio_engine.model.kv_cache import KVCache
    from trio_engine.model.lora import LoRAAdapters, LoRATokens
    from trio_engine.model.prompt_embeds import BatchEmbeds
    from trio_engine.model.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the decoder computes in one step; rows that compute one token come first.

    Attributes:
        token_ids: ``[num_tokens]`` int64.
        positions: ``[num_tokens]`` int64, of each token in its row.
        slots: ``[num_tokens]`` int64, where each token's KV goes.
        sampling_tokens: ``[num_sampling]`` int64, indices of the tokens whose successor is drawn;
            None if there are none.
        full: attention of layers that see everything.
        sliding: attention of layers with a window. Where a model has but one kind of layers, both
            are its kind's.
        lora: the tokens of each adapter in the batch; empty if there is none.
        embeds: what stands in place of tokens; None if nothing does.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampling_tokens: Tensor | None
    full: AttentionView
    sliding: AttentionView
    lora: tuple[LoRATokens, ...] = ()
    embeds: BatchEmbeds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """The rows of one step in the batch's order, as host arrays.

    Attributes:
        order: ``[num_rows]``: the plan's index of each row of the batch.
        slots: ``[num_rows]``: the rows' places.
        counts: ``[num_rows]``: tokens that each computes.
        starts: ``[num_rows + 1]``: where its tokens start in the batch.
        sampling: indices of the rows whose last token is computed.
    """

    order: NDArray[np.int64]
    slots: NDArray[np.int64]
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    sampling: NDArray[np.int64]


def lay_out(rows: Rows, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> StepLayout:
    """Orders a step's rows: decoding ones first, by length, so that neighbours pad little."""
    order = np.lexsort((rows.num_computed[slots], counts > 1))
    slots, counts = slots[order], counts[order]
    starts = np.concatenate(([0], np.cumsum(counts)))
    samples = rows.num_computed[slots] + counts == rows.num_tokens[slots]
    return StepLayout(
        order=order, slots=slots, counts=counts, starts=starts, sampling=np.flatnonzero(samples)
    )


class BatchBuilder:
    """Builds batches for one cache and device.

    Args:
        rows: the persistent rows.
        cache: gives block size and the bytes of a block.
        model: which layers slide, and their window.
        adapters: those that rows may use.
        device: of the batches.
        dtype: of the model's weights.
    """

    def __init__(
        self,
        rows: Rows,
        cache: KVCache,
        model: ModelConfig,
        adapters: LoRAAdapters,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._model = model
        self._adapters = adapters
        self._device = device
        self._dtype = dtype

    def build(
        self,
        layout: StepLayout,
        last_tokens: Tensor | None = None,
        embeds: BatchEmbeds | None = None,
        size: GraphSize | None = None,
    ) -> Batch:
        """Builds a step's batch.

        Args:
            layout: of the step.
            last_tokens: ``[max_num_seqs]`` int64 on the device: the newest token of each row. Read
                for rows whose newest token the host does not know; None if it knows all.
            embeds: that stand in place of tokens.
            size: pad a step whose rows all decode to it, behind the rows of the layout; None pads
                nothing.
        """
        rows = self._rows
        token_slots = np.repeat(layout.slots, layout.counts)
        origins = rows.num_computed[layout.slots] - layout.starts[:-1]
        positions = np.arange(token_slots.size) + np.repeat(origins, layout.counts)
        token_ids, device_positions, kv_slots = self._tokens(token_slots, positions, size)
        if last_tokens is not None:
            unsettled = np.flatnonzero(positions >= rows.num_settled[token_slots])
            self._fill_in(token_ids, unsettled, token_slots[unsettled], last_tokens)
        full, sliding = self._views(layout, size)
        return Batch(
            token_ids=token_ids,
            positions=device_positions,
            slots=kv_slots,
            sampling_tokens=self._sampling_tokens(layout),
            full=full,
            sliding=sliding,
            lora=self._adapters.tokens_of(rows.lora_ids[token_slots], self._device),
            embeds=embeds,
        )

    def _tokens(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], size: GraphSize | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The batch's tokens on the device: their ids, their positions, and where their KV goes."""
        rows, block_size = self._rows, self._cache.shape.block_size
        blocks = rows.block_tables[slots, positions // block_size].astype(np.int64)
        kv_slots = blocks * block_size + positions % block_size
        token_ids = rows.token_ids[slots, positions].astype(np.int64)
        if size is not None:
            scratch_slot = self._cache.scratch_block * block_size
            padding = np.tile([[0], [0], [scratch_slot]], size.num_rows - len(positions))
            host = np.stack((token_ids, positions, kv_slots))
            token_ids, positions, kv_slots = np.concatenate((host, padding), axis=1)
        return (
            to_device(token_ids, self._device),
            to_device(positions, self._device),
            to_device(kv_slots, self._device),
        )

    def _fill_in(
        self,
        token_ids: Tensor,
        indices: NDArray[np.int64],
        slots: NDArray[np.int64],
        last_tokens: Tensor,
    ) -> None:
        if indices.size:
            newest = last_tokens.index_select(0, to_device(slots, self._device))
            token_ids.index_copy_(0, to_device(indices, self._device), newest)

    def _sampling_tokens(self, layout: StepLayout) -> Tensor | None:
        if not layout.sampling.size:
            return None
        return to_device(layout.starts[layout.sampling + 1] - 1, self._device)

    def _views(
        self, layout: StepLayout, size: GraphSize | None
    ) -> tuple[AttentionView, AttentionView]:
        rows = RowLayout(
            starts=layout.starts,
            ends=self._rows.num_computed[layout.slots] + layout.counts,
            num_decodes=int((layout.counts == 1).sum()),
            block_tables=self._rows.block_tables[layout.slots],
        )
        num_blocks = None
        if size is not None:
            rows, num_blocks = self._padded(rows, size.num_rows), size.num_blocks
        # Laid out only for layers that exist: many models have one kind.
        slides = self._model.layer_is_sliding
        full = None if all(slides) else self._view(rows, None, num_blocks)
        window = self._model.sliding_window
        sliding = self._view(rows, window, num_blocks) if any(slides) else full
        assert sliding is not None
        return full or sliding, sliding

    def _padded(self, rows: RowLayout, num_rows: int) -> RowLayout:
        """Adds rows of one token, which lies in the scratch block."""
        num_more = num_rows - len(rows.ends)
        width = rows.block_tables.shape[1]
        scratch = np.full((num_more, width), self._cache.scratch_block, dtype=np.int32)
        return RowLayout(
            starts=np.arange(num_rows + 1),
            ends=np.concatenate((rows.ends, np.ones(num_more, dtype=np.int64))),
            num_decodes=num_rows,
            block_tables=np.concatenate((rows.block_tables, scratch)),
        )

    def _view(self, rows: RowLayout, window: int | None, num_blocks: int | None) -> AttentionView:
        return attention_view(
            rows, window, self._cache, self._device, self._dtype, padded_blocks=num_blocks
        )
