"""Causal attention of a mixed batch over the paged KV cache.

Layer: model. Runs, once per layer, what ``attention_layout`` has laid out once per step. Rows that
decode (one token each) come first in a batch and are computed together over padded contexts;
longer chunks are computed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from trio_engine.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows ``start:stop``, one token each, over contexts padded to ``length`` keys.

    Attributes:
        start: first row, and token.
        stop: behind the last.
        block_ids: ``[num_rows * blocks_per_row]`` int32, row by row.
        length: keys per row; at most ``blocks_per_row * block_size``.
        mask: ``[num_rows, 1, 1, length]``, added to scores; None if every row sees every key.
    """

    start: int
    stop: int
    block_ids: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens ``start:stop`` of the batch, all of one row.

    Attributes:
        start: first token.
        stop: behind the last.
        block_ids: ``[num_blocks]`` int32 that hold the keys; None if they are all computed in
            this step.
        first_key: where the keys start: a token of the batch without ``block_ids``, else an
            offset into the gathered blocks.
        num_keys: keys from there on.
        mask: ``[stop - start, num_keys]``, added to scores; None if it is the plain triangle.
    """

    start: int
    stop: int
    block_ids: Tensor | None
    first_key: int
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionView:
    """The attention work of one step, for all layers with the same window."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]


def attend(
    queries: Tensor, keys_values: Tensor, cache: KVCache, layer: int, view: AttentionView
) -> Tensor:
    """Computes one layer's attention.

    Args:
        queries: ``[num_tokens, num_heads, head_dim]``, rotated.
        keys_values: ``[num_tokens, 2, num_kv_heads, head_dim]`` of the same tokens, in the cache
            already.
        cache: holds the keys and values of earlier tokens.
        layer: index.
        view: of this batch and the layer's window.

    Returns:
        ``[num_tokens, num_heads * head_dim]``.
    """
    parts = [_decode(queries, cache, layer, group) for group in view.decodes]
    parts += [_prefill(queries, keys_values, cache, layer, chunk) for chunk in view.prefills]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(queries: Tensor, cache: KVCache, layer: int, group: DecodeGroup) -> Tensor:
    """``[num_rows, num_heads * head_dim]`` of a group's rows."""
    num_rows, head_dim = group.stop - group.start, queries.shape[-1]
    gathered = cache.gather(layer, group.block_ids)
    num_kv_heads = gathered.shape[2]
    # [num_rows, num_kv_heads, length, head_dim], of what lies there as
    # [num_rows, slots_per_row, 2, num_kv_heads, head_dim].
    size = (num_rows, num_kv_heads, group.length, head_dim)
    slot_stride = gathered.stride(0)
    strides = (gathered.shape[0] // num_rows * slot_stride, head_dim, slot_stride, 1)
    keys = gathered.as_strided(size, strides, 0)
    values = gathered.as_strided(size, strides, num_kv_heads * head_dim)
    # The query heads that share a KV head stand where a prompt's tokens would: nothing is repeated.
    grouped = queries[group.start : group.stop].view(num_rows, num_kv_heads, -1, head_dim)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    return attended.reshape(num_rows, -1)


def _prefill(
    queries: Tensor, keys_values: Tensor, cache: KVCache, layer: int, chunk: PrefillChunk
) -> Tensor:
    """``[num_tokens, num_heads * head_dim]`` of a chunk's tokens."""
    if chunk.block_ids is not None:
        keys_values = cache.gather(layer, chunk.block_ids)
    keys_values = keys_values[chunk.first_key : chunk.first_key + chunk.num_keys]
    num_tokens = chunk.stop - chunk.start
    shape = (num_tokens, keys_values.shape[2], -1, queries.shape[-1])
    grouped = queries[chunk.start : chunk.stop].view(shape).permute(1, 2, 0, 3)
    # Query heads that share a KV head see the same memory: expand copies nothing.
    shared = keys_values.permute(1, 2, 0, 3).unsqueeze(2)
    keys, values = shared.expand(2, *grouped.shape[:2], -1, -1)
    attended = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None
    )
    return attended.permute(2, 0, 1, 3).reshape(num_tokens, -1)
