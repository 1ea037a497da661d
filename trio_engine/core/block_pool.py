"""The KV blocks: which are free, who refers to the others, and which hold what may be used again.

Pure. A block with a live reference is never handed out; ``free + held = total`` always.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class BlockPool:
    """``num_blocks`` block ids, 0 to ``num_blocks - 1``, with reference counts.

    A block may be *cached*: its hash is in the index, by which a request finds it. A cached block
    that nobody holds is free and stays findable until it is handed out. Free blocks are handed
    out last in, first out while there are some that are not cached: their memory is the warmest.
    Then the cached one goes whose last reference went longest ago.

    Counterpart: ``vllm/v1/core/block_pool.py``. There several blocks may be cached under one
    hash; here the first one stays, and the others are as if they were not full.
    """

    __slots__ = (
        "_blocks_by_hash",
        "_free",
        "_free_cached",
        "_hashes",
        "_reference_counts",
        "num_blocks",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Free and not cached.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Free and cached, the next to go first.
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._reference_counts = [0] * num_blocks
        # The index and, by block, its inverse.
        self._blocks_by_hash: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` can hand out now."""
        return len(self._free) + len(self._free_cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by a hash, held or free."""
        return len(self._blocks_by_hash)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0-1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Hands out free blocks with one reference each; the caller has looked that they exist.

        A cached block among them cannot be found any more.
        """
        num_evicted = num_blocks - len(self._free)
        num_cached = len(self._free_cached)
        assert num_evicted <= num_cached, f"{num_blocks} blocks of {self.num_free_blocks} free"
        if num_evicted > 0:
            block_ids = self._free[::-1] + self._evict_oldest(num_evicted)
            self._free.clear()
        else:
            first = -num_evicted
            block_ids = self._free[first:][::-1]
            del self._free[first:]
        for block_id in block_ids:
            self._reference_counts[block_id] = 1
        return block_ids

    def retain(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to blocks that are held or cached."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                assert block_id in self._free_cached, f"block {block_id} is free"
                del self._free_cached[block_id]
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops a reference of each; a block without one is free again.

        Of those released by one call, the first are evicted first.
        """
        reference_counts, hashes = self._reference_counts, self._hashes
        for block_id in block_ids:
            count = reference_counts[block_id] - 1
            assert count >= 0, f"block {block_id} freed twice"
            reference_counts[block_id] = count
            if count == 0:
                if hashes[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._free_cached[block_id] = None

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of them nobody refers to."""
        return [self._reference_counts[block_id] for block_id in block_ids].count(0)

    def reference_count(self, block_id: int) -> int:
        """How many requests refer to a block."""
        return self._reference_counts[block_id]

    # The index

    def find(self, block_hash: bytes) -> int | None:
        """The cached block with this hash; ``retain`` it before anything else is allocated."""
        return self._blocks_by_hash.get(block_hash)

    def hash_of(self, block_id: int) -> bytes | None:
        """Under what a block is cached; None if it is not."""
        return self._hashes[block_id]

    def cache(self, block_ids: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Makes held blocks findable, each unless another one is under its hash already.

        Their contents must not change as long as they can be found.
        """
        blocks_by_hash, hashes = self._blocks_by_hash, self._hashes
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            assert self._reference_counts[block_id] > 0, f"block {block_id} is free"
            assert hashes[block_id] is None, f"block {block_id} is cached already"
            if block_hash not in blocks_by_hash:
                blocks_by_hash[block_hash] = block_id
                hashes[block_id] = block_hash

    def forget_all(self) -> None:
        """No block can be found any more; who holds one keeps it."""
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self._blocks_by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def check_integrity(self) -> None:
        """Raises AssertionError unless free + held = all, and index and blocks agree."""
        free = {*self._free, *self._free_cached}
        assert len(free) == self.num_free_blocks, "a block is free twice"
        for block_id, count in enumerate(self._reference_counts):
            assert count >= 0, f"block {block_id} has {count} references"
            assert (count == 0) == (block_id in free), f"block {block_id} is lost or doubled"
        for block_id in free:
            is_cached = self._hashes[block_id] is not None
            assert is_cached == (block_id in self._free_cached), f"block {block_id} in wrong list"
        cached = {block_hash: i for i, block_hash in enumerate(self._hashes) if block_hash}
        assert cached == self._blocks_by_hash, "the index and the blocks differ"

    def _evict_oldest(self, num_blocks: int) -> list[int]:
        block_ids = []
        for _ in range(num_blocks):
            block_id, _ = self._free_cached.popitem(last=False)
            block_hash, self._hashes[block_id] = self._hashes[block_id], None
            assert block_hash is not None
            del self._blocks_by_hash[block_hash]
            block_ids.append(block_id)
        return block_ids
