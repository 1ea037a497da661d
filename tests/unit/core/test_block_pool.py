"""Blocks are handed out once, and free + held is always all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trio_engine.core.block_pool import BlockPool


def test_a_new_pool_has_every_block_free() -> None:
    pool = BlockPool(3)
    assert (pool.num_free_blocks, pool.usage) == (3, 0.0)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert (pool.num_free_blocks, pool.usage) == (0, 1.0)


def test_the_last_freed_block_is_handed_out_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.release([first])
    pool.release([second])
    assert pool.allocate(2) == [second, first]


def test_a_retained_block_stays_held_until_its_last_reference_goes() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.retain(blocks)
    assert pool.reference_count(blocks[0]) == 2
    pool.release(blocks)
    assert (pool.num_free_blocks, pool.reference_count(blocks[0])) == (0, 1)
    pool.release(blocks)
    assert pool.num_free_blocks == 1
    pool.check_integrity()


def test_allocating_nothing_changes_nothing() -> None:
    pool = BlockPool(1)
    assert pool.allocate(0) == []
    assert pool.num_free_blocks == 1


def test_more_than_is_free_is_a_bug_of_the_caller() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks of 1 free"):
        pool.allocate(2)
    assert pool.num_free_blocks == 1


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match=f"block {blocks[0]} freed twice"):
        pool.release(blocks)


def test_a_free_block_cannot_be_retained() -> None:
    with pytest.raises(AssertionError, match="block 0 is free"):
        BlockPool(1).retain([0])


def test_the_integrity_check_finds_a_block_that_is_free_twice() -> None:
    pool = BlockPool(2)
    pool._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check_integrity()


def test_the_integrity_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool._free.remove(1)
    with pytest.raises(AssertionError, match="block 1 is lost"):
        pool.check_integrity()


@pytest.mark.parametrize("count", [-1, 1])
def test_the_integrity_check_finds_a_wrong_reference_count(count: int) -> None:
    pool = BlockPool(2)
    pool._reference_counts[0] = count
    with pytest.raises(AssertionError, match="block 0"):
        pool.check_integrity()


@given(st.data())
def test_free_plus_held_equals_total_and_no_live_block_is_handed_out(data: st.DataObject) -> None:
    """The pool against a model: a dict of references by block."""
    total = data.draw(st.integers(1, 6))
    pool = BlockPool(total)
    references: dict[int, int] = {}
    for move in data.draw(st.lists(st.sampled_from(["allocate", "retain", "release"]))):
        if move == "allocate":
            blocks = pool.allocate(data.draw(st.integers(0, pool.num_free_blocks)))
            assert not references.keys() & set(blocks)
            references.update(dict.fromkeys(blocks, 1))
        elif references:
            block = data.draw(st.sampled_from(sorted(references)))
            if move == "retain":
                pool.retain([block])
                references[block] += 1
            else:
                pool.release([block])
                references[block] -= 1
                if references[block] == 0:
                    del references[block]
        assert pool.num_free_blocks + len(references) == total
        for block in range(total):
            assert pool.reference_count(block) == references.get(block, 0)
        pool.check_integrity()
