"""Blocks for requests: how many a request needs, and giving and taking them.

Pure. Counterpart: ``vllm/v1/core/kv_cache_manager.py``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trio_engine.core.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import ExecutorProperties
    from trio_engine.core.request import Request

logger = logging.getLogger(__name__)


class KVCacheManager:
    """Keeps each request's block table as long as its planned tokens need."""

    __slots__ = ("block_size", "pool")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    @property
    def usage(self) -> float:
        """Share of the KV cache that is held, 0-1."""
        return self.pool.usage

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Makes room for the first ``num_tokens`` tokens of a request.

        Returns:
            The block ids added to its table, often none; None if too few blocks are free, then
            nothing has changed.
        """
        num_missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if num_missing <= 0:
            return []
        if num_missing > self.pool.num_free_blocks:
            return None
        block_ids = self.pool.allocate(num_missing)
        request.block_ids.extend(block_ids)
        return block_ids

    def free(self, request: Request) -> None:
        """Takes all blocks of a request.

        They may be handed out at once though plans in flight still write there: plans run in
        order, so the new owner writes later (rule 3).
        """
        self.pool.release(request.block_ids)
        request.block_ids = []

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raises AssertionError unless exactly ``holders`` account for all held blocks."""
        self.pool.check_integrity()
        references = [0] * self.pool.num_blocks
        for request in holders:
            for block_id in request.block_ids:
                references[block_id] += 1
        for block_id, count in enumerate(references):
            held = self.pool.reference_count(block_id)
            assert held == count, f"block {block_id}: {held} references, {count} holders"


def effective_max_model_len(config: EngineConfig, properties: ExecutorProperties) -> int:
    """Tokens of one request: the model's or the configured limit, or what the KV cache holds.

    The last token's KV is never computed, so a cache of c tokens holds a request of c + 1. A
    larger limit would let a lone request outgrow the cache and be preempted for ever.
    """
    capacity = properties.num_blocks * properties.block_size + 1
    limit = min(properties.max_model_len, config.max_model_len or properties.max_model_len)
    if capacity < limit:
        logger.warning("max_model_len_cut from=%d to=%d reason='KV cache'", limit, capacity)
    return min(limit, capacity)
