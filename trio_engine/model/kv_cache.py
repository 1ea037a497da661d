"""The paged KV cache: its tensor, and how many blocks of it fit.

Layer: model. Which block belongs to whom is decided in ``core``; here blocks are only indices.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

import msgspec
import torch

from trio_engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from trio_engine.config import EngineConfig
    from trio_engine.model.config import ModelConfig

DEFAULT_CPU_BYTES = 1 << 30
"""KV cache on CPU if nothing is asked for; less where half of the free memory is less."""

DEFAULT_CUDA_SHARE = 0.9
"""KV cache on CUDA if nothing is asked for, of what is free after the load and a reserve."""


class KVCacheShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a KV cache except for how many blocks it has."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    item_size: int

    @classmethod
    def of(cls, model: ModelConfig, block_size: int, dtype: torch.dtype) -> KVCacheShape:
        """The shape that a model needs."""
        return cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            item_size=dtype.itemsize,
        )

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values."""
        return self.block_size * 2 * self.num_kv_heads * self.head_dim * self.item_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.layer_block_bytes


class KVCache:
    """Keys and values of all layers, ``[num_layers, slots, 2, num_kv_heads, head_dim]``.

    A slot is a token's place: ``block_id * block_size + offset``. Keys and values of a token lie
    side by side, so that one scatter writes and one gather reads both. Behind the last lie two
    more: block tables are padded with ``null_block``, which is never written, and rows that only
    fill up a batch write to ``scratch_block``.

    On CPU memory becomes resident only as blocks are written.

    Args:
        shape: sizes.
        num_blocks: blocks that requests may hold.
        device: where it lives.
        dtype: of keys and values.
    """

    def __init__(
        self, shape: KVCacheShape, num_blocks: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        self.scratch_block = num_blocks + 1
        self._device, self._dtype = device, dtype
        self.allocate()

    def allocate(self) -> None:
        """Takes its memory, zeroed; all there was is forgotten."""
        shape, num_blocks = self.shape, self.num_blocks + 2
        num_items = num_blocks * shape.block_bytes // shape.item_size
        flat = _zeros(num_items, self._device, self._dtype)
        token = (2, shape.num_kv_heads, shape.head_dim)
        slots = flat.view(shape.num_layers, num_blocks * shape.block_size, *token)
        self._blocks = flat.view(shape.num_layers, num_blocks, -1)
        # Views of each layer, so that a step need not make them.
        self._layer_slots, self._layer_blocks = slots.unbind(), self._blocks.unbind()
        self._gathered = flat.new_empty(0, self._blocks.shape[2])

    def release(self) -> None:
        """Lets go of its memory. Only ``allocate`` may follow."""
        self._layer_slots = self._layer_blocks = ()
        self._blocks = self._gathered = torch.empty(0)

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Stores tokens.

        Args:
            layer: index.
            slots: ``[num_tokens]`` int64.
            keys_values: ``[num_tokens, 2, num_kv_heads, head_dim]``.
        """
        self._layer_slots[layer].index_copy_(0, slots, keys_values)

    def gather(self, layer: int, block_ids: Tensor) -> Tensor:
        """Copies blocks out, one behind the other.

        Args:
            layer: index.
            block_ids: ``[num_blocks]`` int32 or int64.

        Returns:
            ``[num_blocks * block_size, 2, num_kv_heads, head_dim]``, valid until the next gather.
        """
        num_blocks = block_ids.shape[0]
        out = self.reserve_gather(num_blocks)[:num_blocks]
        torch.index_select(self._layer_blocks[layer], 0, block_ids, out=out)
        return out.view(-1, 2, self.shape.num_kv_heads, self.shape.head_dim)

    def reserve_gather(self, num_blocks: int) -> Tensor:
        """Makes room for a gather of so many blocks, and gives all the room that there is.

        Whoever holds it may go on to use it when a larger one has taken its place.
        """
        if self._gathered.shape[0] < num_blocks:
            self._gathered = self._gathered.new_empty(num_blocks, self._gathered.shape[1])
        return self._gathered

    def clear(self, block_ids: Tensor) -> None:
        """Zeroes blocks that got a new owner.

        Attention multiplies what it masks out by zero, which an infinity or NaN left by a
        previous owner would survive.
        """
        self._blocks.index_fill_(1, block_ids, 0)


def choose_num_blocks(
    config: EngineConfig, shape: KVCacheShape, max_model_len: int, free_bytes: int, *, is_cpu: bool
) -> int:
    """How many blocks the options and the free memory come to.

    Without ``num_blocks`` and ``kv_cache_bytes`` it is a share of what is free, and never more
    than ``max_num_seqs`` requests of ``max_model_len`` tokens can fill.

    Args:
        config: ``num_blocks``, ``kv_cache_bytes`` and ``max_num_seqs`` are read.
        shape: of the cache.
        max_model_len: tokens of one request.
        free_bytes: memory that the cache may take, less what a forward pass needs beside it.
        is_cpu: which default share holds.

    Raises:
        ConfigError: what is asked for does not fit, or not even one block does.
    """
    if config.num_blocks is not None:
        _require_room("num_blocks", config.num_blocks, config.num_blocks, shape, free_bytes)
        return config.num_blocks
    if config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // shape.block_bytes
        _require_room("kv_cache_bytes", config.kv_cache_bytes, num_blocks, shape, free_bytes)
        return num_blocks
    share = min(DEFAULT_CPU_BYTES, free_bytes // 2) if is_cpu else free_bytes * DEFAULT_CUDA_SHARE
    most = config.max_num_seqs * math.ceil(max_model_len / shape.block_size)
    num_blocks = min(most, int(share) // shape.block_bytes)
    _require_room("num_blocks", None, num_blocks, shape, free_bytes)
    return num_blocks


def _require_room(
    option: str, value: int | None, num_blocks: int, shape: KVCacheShape, free_bytes: int
) -> None:
    needed = max(1, num_blocks) * shape.block_bytes
    if num_blocks >= 1 and needed <= free_bytes:
        return
    raise ConfigError(
        f"{option} {value}: a KV cache of {num_blocks} blocks of {shape.block_size} tokens cannot "
        f"be; one takes {shape.block_bytes} bytes, and {free_bytes} bytes are free for it"
    )


def _zeros(num_elements: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_elements, device=device, dtype=dtype)
    # torch.zeros would write every page, and torch.empty may hand out memory with old contents.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, num_elements * dtype.itemsize, flags=private)
    return torch.frombuffer(pages, dtype=dtype)
