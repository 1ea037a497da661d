"""A state machine for the KV blocks: the pool against a list of counts.

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


class BlockPoolMachine(RuleBasedStateMachine):
    """A ``BlockPool`` beside the number of references that each block should have.

    Attributes:
        pool: under test.
        references: by block id.
    """

    holders: Bundle[list[int]] = Bundle("holders")

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        """Begins with a pool."""
        self.pool = self.make_pool(num_blocks)
        self.references = [0] * num_blocks

    def make_pool(self, num_blocks: int) -> BlockPool:
        """The pool under test; override it for one of your own."""
        return BlockPool(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that should be free."""
        return self.references.count(0)

    @rule(target=holders, num_blocks=st.integers(0, 4))
    def allocate(self, num_blocks: int) -> list[int]:
        """So many blocks, or as many as there are."""
        wanted = min(num_blocks, self.num_free)
        block_ids = self.pool.allocate(wanted)
        assert len(set(block_ids)) == len(block_ids) == wanted
        for block_id in block_ids:
            assert not self.references[block_id], f"block {block_id} was handed out while held"
            self.references[block_id] = 1
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

    @precondition(lambda self: self.num_free > 0)
    @rule()
    def misuse(self) -> None:
        """What no caller may do is noticed and changes nothing."""
        block_id = self.references.index(0)
        _expect_assertion(self.pool.retain, [block_id])
        _expect_assertion(self.pool.release, [block_id])
        _expect_assertion(self.pool.allocate, self.num_free + 1)

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


def _expect_assertion(call: Callable[..., object], argument: Any) -> None:
    try:
        call(argument)
    except AssertionError:
        return
    raise AssertionError(f"{call.__qualname__}({argument!r}) passed unnoticed")
