"""Causal attention of a mixed batch over the paged KV cache.

Layer: model. Runs, once per layer, what ``attention_layout`` has laid out once per step. Rows that
decode (one token each) come first in a batch and are computed together over padded contexts;
longer chunks are computed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    out = queries.new_empty(queries.shape)
    for group in view.decodes:
        _decode(queries, cache, layer, group, out)
    for chunk in view.prefills:
        _prefill(queries, keys_values, cache, layer, chunk, out)
    return out.flatten(1)


def _decode(queries: Tensor, cache: KVCache, layer: int, group: DecodeGroup, out: Tensor) -> None:
    num_rows = group.stop - group.start
    gathered = cache.gather(layer, group.block_ids)
    contexts = gathered.view(num_rows, -1, *gathered.shape[1:])[:, : group.length]
    keys, values = contexts.permute(2, 0, 3, 1, 4)  # [num_rows, num_kv_heads, length, head_dim]
    # The query heads that share a KV head stand where a prompt's tokens would: nothing is repeated.
    shape = (num_rows, keys.shape[1], -1, queries.shape[-1])
    grouped = queries[group.start : group.stop].view(shape)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    out[group.start : group.stop].view(shape).copy_(attended)


def _prefill(
    queries: Tensor,
    keys_values: Tensor,
    cache: KVCache,
    layer: int,
    chunk: PrefillChunk,
    out: Tensor,
) -> None:
    if chunk.block_ids is not None:
        keys_values = cache.gather(layer, chunk.block_ids)
    keys_values = keys_values[chunk.first_key : chunk.first_key + chunk.num_keys]
    shape = (chunk.stop - chunk.start, keys_values.shape[2], -1, queries.shape[-1])
    grouped = queries[chunk.start : chunk.stop].view(shape).permute(1, 2, 0, 3)
    # Query heads that share a KV head see the same memory: expand copies nothing.
    shared = keys_values.permute(1, 2, 0, 3).unsqueeze(2)
    keys, values = shared.expand(2, *grouped.shape[:2], -1, -1)
    attended = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None
    )
    out[chunk.start : chunk.stop].view(shape).copy_(attended.permute(2, 0, 1, 3))
