"""Lays out a step's attention: which rows are padded together, which chunks get which mask.

Layer: model. Host work, once per step and window; what it bounds is the memory of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trio_engine.model.attention import AttentionView, DecodeGroup, PrefillChunk
from trio_engine.model.device import to_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from trio_engine.model.kv_cache import KVCache

# Padded contexts gathered at once. On CPU they should stay in the cache between gather and
# product: 32 rows of 160 tokens took 2.0 ms a layer at once and 0.8 ms in four groups (2 cores
# with 1 MiB L2 and 8 MiB L3, KV of 3 heads of 64).
_CPU_GATHER_BYTES = 2 << 20
_CUDA_GATHER_BYTES = 256 << 20
_MASK_BYTES = 32 << 20


def gather_bytes(device: torch.device) -> int:
    """KV that is gathered at once in a layer, if not a single row needs more."""
    return _CPU_GATHER_BYTES if device.type == "cpu" else _CUDA_GATHER_BYTES


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of a batch as host arrays, rows that compute one token first.

    Attributes:
        starts: ``[num_rows + 1]``: row i computes the batch's tokens ``starts[i]:starts[i + 1]``.
        ends: ``[num_rows]``: the row's tokens after this step, which is how many keys its last
            token sees.
        num_decodes: leading rows that compute one token.
        block_tables: ``[num_rows, max_blocks]`` int32, padded with the null block.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    num_decodes: int
    block_tables: NDArray[np.int32]


def attention_view(
    rows: RowLayout,
    window: int | None,
    cache: KVCache,
    device: torch.device,
    dtype: torch.dtype,
    *,
    padded_blocks: int | None = None,
) -> AttentionView:
    """Lays out a step's attention.

    Args:
        rows: of the batch; decoding rows should be sorted by length, since neighbours are padded
            to the longest of their group.
        window: how many tokens a token sees, itself included; None for all.
        cache: gives block and item sizes.
        device: of the batch.
        dtype: of the scores' masks.
        padded_blocks: of rows that all decode: pad each to so many blocks, and mask all, so that
            the layout depends on nothing but their number. None for as little as they need.
    """
    planner = _Planner(rows, window, cache, device, dtype)
    if padded_blocks is not None:
        return AttentionView((planner.padded_decodes(padded_blocks),), ())
    return AttentionView(tuple(planner.decodes()), tuple(planner.prefills()))


class _Planner:
    """Cuts the rows into groups and chunks whose gathers and masks stay within budgets."""

    def __init__(
        self,
        rows: RowLayout,
        window: int | None,
        cache: KVCache,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._rows = rows
        self._window = window
        self._block_size = cache.shape.block_size
        self._block_bytes = cache.shape.layer_block_bytes
        self._device = device
        self._dtype = dtype
        self._gather_bytes = gather_bytes(device)

    def decodes(self) -> Iterator[DecodeGroup]:
        num_rows = self._rows.num_decodes
        ends = self._rows.ends[:num_rows]
        first_blocks = self._first_visible(ends - 1) // self._block_size
        num_blocks = -(-ends // self._block_size) - first_blocks
        for start, stop in _groups(num_blocks.tolist(), self._gather_bytes // self._block_bytes):
            rows = slice(start, stop)
            yield self._decode_group(
                rows, ends[rows], first_blocks[rows], int(num_blocks[rows].max())
            )

    def padded_decodes(self, num_blocks: int) -> DecodeGroup:
        """All rows as one group whose keys begin with their first, window or not."""
        ends = self._rows.ends
        length = num_blocks * self._block_size
        mask = self._mask(self._first_visible(ends - 1), ends, length)[:, None, None]
        block_ids = self._blocks(slice(None), np.arange(num_blocks)[None])
        return DecodeGroup(0, len(ends), block_ids, length, mask)

    def prefills(self) -> Iterator[PrefillChunk]:
        rows = self._rows
        for row in range(rows.num_decodes, len(rows.ends)):
            start, stop = int(rows.starts[row]), int(rows.starts[row + 1])
            yield from self._prefill_chunks(row, start, stop, int(rows.ends[row]))

    def _first_visible(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._window is None:
            return np.zeros_like(positions)
        return np.maximum(positions + 1 - self._window, 0)

    def _decode_group(
        self,
        rows: slice,
        ends: NDArray[np.int64],
        first_blocks: NDArray[np.int64],
        num_blocks: int,
    ) -> DecodeGroup:
        block_ids = self._blocks(rows, first_blocks[:, None] + np.arange(num_blocks))
        origins = first_blocks * self._block_size
        length = int((ends - origins).max())
        first_seen = self._first_visible(ends - 1) - origins
        mask = None
        if length != (ends - origins).min() or first_seen.any():
            mask = self._mask(first_seen, ends - origins, length)[:, None, None]
        return DecodeGroup(rows.start, rows.stop, block_ids, length, mask)

    def _blocks(self, rows: slice, columns: NDArray[np.int64]) -> Tensor:
        """``[num_rows * num_columns]``: what stands in these columns of the rows' tables."""
        tables = self._rows.block_tables[rows]
        # Columns past a table's width repeat its last block; the mask hides what they hold.
        columns = np.minimum(columns, tables.shape[1] - 1)
        return to_device(np.take_along_axis(tables, columns, axis=1).reshape(-1), self._device)

    def _prefill_chunks(self, row: int, start: int, stop: int, end: int) -> Iterator[PrefillChunk]:
        first_position = end - (stop - start)
        is_whole = first_position == 0  # every key of the row is computed in this very step
        if is_whole and (self._window is None or end <= self._window):
            yield PrefillChunk(start, stop, None, start, stop - start, None)
            return
        size = max(1, _MASK_BYTES // (end * self._dtype.itemsize))
        for lower in range(first_position, end, size):
            upper = min(lower + size, end)
            yield self._masked_chunk(row, start - first_position, lower, upper, is_whole=is_whole)

    def _masked_chunk(
        self, row: int, token_offset: int, lower: int, upper: int, *, is_whole: bool
    ) -> PrefillChunk:
        """The chunk of positions ``lower:upper``; position p is token ``token_offset + p``."""
        positions = np.arange(lower, upper)
        first_seen = self._first_visible(positions)
        origin = int(first_seen[0])
        mask = self._mask(first_seen - origin, positions + 1 - origin, upper - origin)
        start, stop = token_offset + lower, token_offset + upper
        if is_whole:
            return PrefillChunk(start, stop, None, token_offset + origin, upper - origin, mask)
        first_block = origin // self._block_size
        blocks = self._rows.block_tables[row, first_block : -(-upper // self._block_size)]
        block_ids = to_device(blocks.copy(), self._device)
        first_key = origin - first_block * self._block_size
        return PrefillChunk(start, stop, block_ids, first_key, upper - origin, mask)

    def _mask(self, firsts: NDArray[np.int64], ends: NDArray[np.int64], num_keys: int) -> Tensor:
        """``[len(firsts), num_keys]``: 0 for the keys ``firsts[i]:ends[i]``, -inf for others."""
        bounds = to_device(np.stack((firsts, ends)), self._device)
        keys = torch.arange(num_keys, device=self._device)
        hidden = keys >= bounds[1][:, None]
        if self._window is not None:
            hidden |= keys < bounds[0][:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)


def _groups(num_blocks: list[int], most_blocks: int) -> Iterator[tuple[int, int]]:
    """Cuts rows into runs whose padded blocks number at most ``most_blocks``, or single rows."""
    start = longest = 0
    for stop, blocks in enumerate(num_blocks):
        longest = max(longest, blocks)
        if stop > start and longest * (stop + 1 - start) > most_blocks:
            yield start, stop
            start, longest = stop, blocks
    if num_blocks:
        yield start, len(num_blocks)
