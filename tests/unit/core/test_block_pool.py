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


# The index


def test_a_cached_block_is_found_while_held_and_while_free() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    assert pool.find(b"hash") is None
    pool.cache([block], [b"hash"])
    assert (pool.find(b"hash"), pool.hash_of(block), pool.num_cached_blocks) == (block, b"hash", 1)
    pool.release([block])
    assert pool.find(b"hash") == block
    assert (pool.num_free_blocks, pool.usage) == (2, 0.0)
    pool.check_integrity()


def test_a_free_cached_block_may_be_held_again_and_is_then_not_handed_out() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache([block], [b"hash"])
    pool.release([block])
    pool.retain([block])
    assert (pool.num_free_blocks, pool.reference_count(block)) == (1, 1)
    assert pool.allocate(1) != [block]
    pool.check_integrity()


def test_what_is_handed_out_cannot_be_found_any_more() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.cache([blocks[0]], [b"hash"])
    pool.release(blocks)
    assert pool.allocate(1) == blocks
    assert (pool.find(b"hash"), pool.hash_of(blocks[0]), pool.num_cached_blocks) == (None, None, 0)
    pool.check_integrity()


def test_blocks_that_nobody_could_find_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.cache([blocks[1]], [b"hash"])
    pool.release(blocks)
    assert set(pool.allocate(2)) == {blocks[0], blocks[2]}
    assert pool.find(b"hash") == blocks[1]
    assert pool.allocate(1) == [blocks[1]]
    assert pool.find(b"hash") is None


def test_the_cached_block_whose_last_reference_went_longest_ago_goes_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.cache([block], [bytes([block])])
    pool.release([blocks[2]])
    pool.release([blocks[0], blocks[1]])
    pool.retain([blocks[2]])  # used again: now it is the youngest
    pool.release([blocks[2]])
    assert pool.allocate(3) == [blocks[0], blocks[1], blocks[2]]


def test_a_second_block_under_a_hash_is_as_if_it_were_not_cached() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache([first], [b"hash"])
    pool.cache([second], [b"hash"])
    assert (pool.find(b"hash"), pool.hash_of(second)) == (first, None)
    pool.release([first, second])
    assert pool.allocate(1) == [second]
    pool.check_integrity()


def test_forgetting_leaves_held_blocks_held_and_free_ones_free() -> None:
    pool = BlockPool(3)
    held, free = pool.allocate(2)
    pool.cache([held], [b"held"])
    pool.cache([free], [b"free"])
    pool.release([free])
    pool.forget_all()
    assert (pool.find(b"held"), pool.find(b"free"), pool.num_cached_blocks) == (None, None, 0)
    assert (pool.num_free_blocks, pool.reference_count(held)) == (2, 1)
    pool.check_integrity()
    pool.cache([held], [b"anew"])
    assert pool.find(b"anew") == held


def test_a_block_that_nobody_holds_cannot_be_cached_nor_one_twice() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.cache([0], [b"hash"])
    (block,) = pool.allocate(1)
    pool.cache([block], [b"hash"])
    with pytest.raises(AssertionError, match="cached already"):
        pool.cache([block], [b"other"])


def test_the_integrity_check_finds_an_index_that_differs_from_the_blocks() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache([block], [b"hash"])
    pool._blocks_by_hash[b"other"] = block
    with pytest.raises(AssertionError, match="index and the blocks differ"):
        pool.check_integrity()
    del pool._blocks_by_hash[b"other"]
    pool.release([block])
    pool._free_cached.popitem()
    pool._free.append(block)
    with pytest.raises(AssertionError, match="wrong list"):
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
