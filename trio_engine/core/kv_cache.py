"""Blocks for requests: how many a request needs, giving and taking them, and using them again.

Pure. Of a request's block table, while it runs:

    block_ids    [ cached | own, full, findable ..... | own, not yet findable .......... ]
                 ^0       ^num_cached_tokens          ^num_findable_blocks

The cached ones are shared and full: nobody writes there any more. ``docs/design/prefix-cache.md``
tells when a block may become findable.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trio_engine.core.block_hash import BlockHasher
from trio_engine.core.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import ExecutorProperties
    from trio_engine.core.request import Request

logger = logging.getLogger(__name__)

# One by one they take twice as long. A prompt of which nothing is found has no more of them hashed
# before it has its slot, whose turn a long one would hold up.
_BLOCKS_HASHED_AT_ONCE = 16


class KVCacheManager:
    """Keeps each request's block table as long as its planned tokens need.

    Args:
        num_blocks: of the KV cache.
        block_size: tokens of a block.
        enable_prefix_caching: whether blocks are used again by requests that begin alike.

    Counterpart: ``vllm/v1/core/kv_cache_manager.py``. There a block can be found as soon as it is
    planned, here once it is computed.
    """

    __slots__ = ("_hasher", "block_size", "enable_prefix_caching", "pool")

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hasher = BlockHasher(block_size)

    @property
    def usage(self) -> float:
        """Share of the KV cache that is held, 0-1."""
        return self.pool.usage

    def reads_cache(self, request: Request) -> bool:
        """Whether a request that starts now may begin with cached blocks."""
        return self.enable_prefix_caching and request.may_read_prefix_cache

    def admit(self, request: Request) -> bool:
        """Gives a request without blocks room for all its known tokens, cached ones first.

        Sets ``num_cached_tokens`` and, as these are computed, ``num_planned_tokens``.

        Returns:
            False if too few blocks are free, then nothing has changed.
        """
        cached = self._find_cached(request)
        num_missing = -(-len(request.token_ids) // self.block_size) - len(cached)
        num_retained = self.pool.count_free(cached)
        if num_missing + num_retained > self.pool.num_free_blocks:
            return False
        self.pool.retain(cached)  # before they could be among those handed out
        request.block_ids = cached + self.pool.allocate(num_missing)
        request.num_findable_blocks = len(cached)
        request.num_cached_tokens = len(cached) * self.block_size
        request.num_planned_tokens = request.num_cached_tokens
        return True

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

    def add_block(self, requests: Sequence[Request]) -> None:
        """Gives each request one block more; the caller has looked that there are enough."""
        block_ids = self.pool.allocate(len(requests))
        for request, block_id in zip(requests, block_ids, strict=True):
            request.block_ids.append(block_id)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Makes blocks findable whose tokens are among the first ``num_tokens`` of a request.

        Plans that computed these tokens have settled (rule 3), and none will compute them again
        in these blocks.
        """
        if not self.enable_prefix_caching:
            return
        first, last = request.num_findable_blocks, num_tokens // self.block_size
        if first < last:
            hashes = self._hasher.hashes(request, last)
            self.pool.cache(request.block_ids[first:last], hashes[first:last])
            request.num_findable_blocks = last

    def free(self, request: Request) -> None:
        """Takes all blocks of a request; of those that are cached, the last are evicted first.

        They may be handed out at once though plans in flight still write there: plans run in
        order, so the new owner writes later (rule 3).
        """
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_findable_blocks = request.num_cached_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets what is cached; False, and nothing is done, while blocks are held."""
        if self.pool.num_free_blocks < self.pool.num_blocks:
            return False
        self.pool.forget_all()
        return True

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raises AssertionError unless exactly ``holders`` account for all held blocks."""
        self.pool.check_integrity()
        references = [0] * self.pool.num_blocks
        for request in holders:
            for index, block_id in enumerate(request.block_ids):
                references[block_id] += 1
                block_hash = self.pool.hash_of(block_id)
                if block_hash is not None:
                    expected = self._hasher.hashes(request, index + 1)[index]
                    assert block_hash == expected, f"{request} holds what block {block_id} is not"
        for block_id, count in enumerate(references):
            held = self.pool.reference_count(block_id)
            assert held == count, f"block {block_id}: {held} references, {count} holders"

    def _find_cached(self, request: Request) -> list[int]:
        """The longest run of cached blocks from the start of a request.

        Its last token is never among them: whoever draws the next one must compute it.
        """
        if not self.reads_cache(request):
            return []
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        block_ids: list[int] = []
        for first in range(0, num_blocks, _BLOCKS_HASHED_AT_ONCE):
            last = min(first + _BLOCKS_HASHED_AT_ONCE, num_blocks)
            for block_hash in self._hasher.hashes(request, last)[first:last]:
                block_id = self.pool.find(block_hash)
                if block_id is None:
                    return block_ids
                block_ids.append(block_id)
        return block_ids


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
