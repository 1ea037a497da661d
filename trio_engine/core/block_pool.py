"""The KV blocks: which are free, and how many requests refer to each of the others.

Pure. A block with a live reference is never handed out; ``free + held = total`` always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class BlockPool:
    """``num_blocks`` block ids, 0 to ``num_blocks - 1``, with reference counts.

    Freed blocks are handed out again last in, first out: their memory is the warmest.
    """

    __slots__ = ("_free", "_reference_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._reference_counts = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` can hand out now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0-1."""
        return 1.0 - len(self._free) / self.num_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Hands out free blocks with one reference each; the caller has looked that they exist."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks of {len(self._free)} free"
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._reference_counts[block_id] = 1
        return block_ids

    def retain(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to blocks that are held."""
        for block_id in block_ids:
            assert self._reference_counts[block_id] > 0, f"block {block_id} is free"
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops a reference of each; a block without one is free again."""
        for block_id in block_ids:
            assert self._reference_counts[block_id] > 0, f"block {block_id} freed twice"
            self._reference_counts[block_id] -= 1
            if self._reference_counts[block_id] == 0:
                self._free.append(block_id)

    def reference_count(self, block_id: int) -> int:
        """How many requests refer to a block."""
        return self._reference_counts[block_id]

    def check_integrity(self) -> None:
        """Raises AssertionError unless free and held blocks are exactly all of them."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block_id, count in enumerate(self._reference_counts):
            assert count >= 0, f"block {block_id} has {count} references"
            assert (count == 0) == (block_id in free), f"block {block_id} is lost or doubled"
