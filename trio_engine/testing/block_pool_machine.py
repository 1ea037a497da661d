"""A state machine for the KV blocks: the pool against counts, and the index against a dict.

Public kit, pure; needs hypothesis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from trio_engine.core.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Callable

HASHES = st.sampled_from([b"0", b"1", b"2", b"3"])


class BlockPoolMachine(RuleBasedStateMachine):
    """A ``BlockPool`` beside the number of references and the hash that each block should have.

    Attributes:
        pool: under test.
        references: by block id.
        hashes: of the blocks that can be found.
        free_cached: of these the free ones, in the order in which they are to be evicted.
    """

    holders: Bundle[list[int]] = Bundle("holders")

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        """Begins with a pool."""
        self.pool = self.make_pool(num_blocks)
        self.references = [0] * num_blocks
        self.hashes: dict[int, bytes] = {}
        self.free_cached: list[int] = []

    def make_pool(self, num_blocks: int) -> BlockPool:
        """The pool under test; override it for one of your own."""
        return BlockPool(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that should be free."""
        return self.references.count(0)

    @rule(target=holders, num_blocks=st.integers(0, 4))
    def allocate(self, num_blocks: int) -> list[int]:
        """So many blocks, or as many as there are; cached ones only if no others are free."""
        wanted = min(num_blocks, self.num_free)
        num_evicted = max(0, wanted - (self.num_free - len(self.free_cached)))
        evicted, self.free_cached = self.free_cached[:num_evicted], self.free_cached[num_evicted:]
        block_ids = self.pool.allocate(wanted)
        assert len(set(block_ids)) == len(block_ids) == wanted
        for block_id in block_ids:
            assert not self.references[block_id], f"block {block_id} was handed out while held"
            self.references[block_id] = 1
        assert {i for i in block_ids if i in self.hashes} == set(evicted), "not the oldest went"
        for block_id in evicted:
            del self.hashes[block_id]
        return block_ids

    @rule(target=holders, block_ids=holders)
    def retain(self, block_ids: list[int]) -> list[int]:
        """Another holder of the same blocks."""
        self.pool.retain(block_ids)
        for block_id in block_ids:
            self.references[block_id] += 1
        return block_ids

    @rule(block_ids=consumes(holders))
    def release(self, block_ids: list[int]) -> None:
        """A holder lets go."""
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.references[block_id] -= 1
            if not self.references[block_id] and block_id in self.hashes:
                self.free_cached.append(block_id)

    # The index

    @rule(block_ids=holders, block_hash=HASHES)
    def cache(self, block_ids: list[int], block_hash: bytes) -> None:
        """The first of the holder's blocks that is not cached; a taken hash stays whose it was."""
        block_id = next((i for i in block_ids if i not in self.hashes), None)
        if block_id is not None:
            self.pool.cache([block_id], [block_hash])
            if block_hash not in self.hashes.values():
                self.hashes[block_id] = block_hash

    @precondition(lambda self: self.hashes)
    @rule(target=holders, block_hash=HASHES)
    def reuse(self, block_hash: bytes) -> list[int]:
        """A holder of the block with this hash, if there is one, be it held or free."""
        block_ids = [i for i, cached in self.hashes.items() if cached == block_hash]
        assert self.pool.find(block_hash) == next(iter(block_ids), None)
        self.pool.retain(block_ids)
        for block_id in block_ids:
            if not self.references[block_id]:
                self.free_cached.remove(block_id)
            self.references[block_id] += 1
        return block_ids

    # Without a precondition, as the first rule by name: see ``promise_machine``.
    @rule()
    def forget_all(self) -> None:
        """Nothing can be found any more, and holders hold on."""
        self.pool.forget_all()
        self.hashes.clear()
        self.free_cached.clear()

    @precondition(lambda self: self.num_free > len(self.free_cached))
    @rule()
    def misuse(self) -> None:
        """What no caller may do is noticed and changes nothing."""
        free = (i for i, count in enumerate(self.references) if not count)
        block_id = next(i for i in free if i not in self.hashes)
        _expect_assertion(self.pool.retain, [block_id])
        _expect_assertion(self.pool.release, [block_id])
        _expect_assertion(self.pool.allocate, self.num_free + 1)

    # Promises

    @invariant()
    def blocks_free_plus_held_equal_total(self) -> None:
        """No block is lost or doubled."""
        self.pool.check_integrity()
        num_held = len(self.references) - self.num_free
        assert self.pool.num_free_blocks + num_held == self.pool.num_blocks
        assert self.pool.usage == 1.0 - self.num_free / len(self.references)

    @invariant()
    def each_block_has_a_reference_of_each_holder(self) -> None:
        """A shared block is held until its last holder lets go."""
        counts = [self.pool.reference_count(i) for i in range(self.pool.num_blocks)]
        assert counts == self.references

    @invariant()
    def a_cached_block_is_found_until_it_is_handed_out(self) -> None:
        """By its own hash, and no other block by that."""
        found = {i: self.pool.hash_of(i) for i in range(self.pool.num_blocks)}
        assert {i: block_hash for i, block_hash in found.items() if block_hash} == self.hashes
        assert self.pool.num_cached_blocks == len(self.hashes)


def _expect_assertion(call: Callable[..., object], argument: Any) -> None:
    try:
        call(argument)
    except AssertionError:
        return
    raise AssertionError(f"{call.__qualname__}({argument!r}) passed unnoticed")
