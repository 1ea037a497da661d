"""Block tables grow with planned tokens, and one request always fits."""

from __future__ import annotations

import logging

import pytest

from tests.unit.core.core_parts import make_properties, make_request
from trio_engine.config import EngineConfig
from trio_engine.core.kv_cache import KVCacheManager, effective_max_model_len


def test_a_table_grows_by_the_blocks_that_its_tokens_need_and_no_more() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=4)
    request = make_request()
    sizes = []
    for num_tokens in range(1, 10):
        added = cache.grow(request, num_tokens)
        assert added is not None
        sizes.append((len(added), len(request.block_ids)))
    assert sizes == [(1, 1), (0, 1), (0, 1), (0, 1), (1, 2), (0, 2), (0, 2), (0, 2), (1, 3)]
    assert len(set(request.block_ids)) == 3
    cache.check_integrity([request])


def test_what_grow_returns_is_the_end_of_the_table() -> None:
    cache = KVCacheManager(num_blocks=8, block_size=1)
    request = make_request()
    cache.grow(request, 2)
    added = cache.grow(request, 5)
    assert added == request.block_ids[2:]
    assert len(added) == 3


def test_too_few_free_blocks_change_nothing() -> None:
    cache = KVCacheManager(num_blocks=3, block_size=1)
    request = make_request()
    cache.grow(request, 2)
    before = list(request.block_ids)
    assert cache.grow(request, 4) is None
    assert request.block_ids == before
    assert cache.pool.num_free_blocks == 1
    assert cache.grow(request, 3) is not None


def test_a_table_that_is_large_enough_already_needs_nothing() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=4)
    request = make_request()
    cache.grow(request, 8)
    assert cache.grow(request, 3) == []
    assert len(request.block_ids) == 2


def test_freed_blocks_are_for_others_at_once() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=1)
    first, second = make_request("a"), make_request("b")
    cache.grow(first, 2)
    assert cache.usage == 1.0
    assert cache.grow(second, 1) is None
    cache.free(first)
    assert first.block_ids == []
    assert cache.usage == 0.0
    assert cache.grow(second, 2) is not None
    cache.check_integrity([first, second])


def test_the_integrity_check_finds_a_holder_that_is_not_named() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=1)
    request = make_request()
    cache.grow(request, 1)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        cache.check_integrity([])


def test_the_integrity_check_finds_a_block_with_two_holders() -> None:
    cache = KVCacheManager(num_blocks=2, block_size=1)
    first, second = make_request("a"), make_request("b")
    cache.grow(first, 1)
    second.block_ids = list(first.block_ids)
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        cache.check_integrity([first, second])


@pytest.mark.parametrize(
    ("configured", "model", "num_blocks", "block_size", "limit"),
    [
        (None, 64, 100, 4, 64),
        (32, 64, 100, 4, 32),
        (128, 64, 100, 4, 64),
        # The last token's KV is never computed: 8 blocks of 4 hold a request of 33 tokens.
        (None, 64, 8, 4, 33),
        (33, 64, 8, 4, 33),
        (32, 64, 8, 4, 32),
        (None, 64, 1, 1, 2),
    ],
)
def test_the_limit_is_the_least_of_what_is_configured_trained_and_held(
    configured: int | None, model: int, num_blocks: int, block_size: int, limit: int
) -> None:
    properties = make_properties(max_model_len=model, num_blocks=num_blocks, block_size=block_size)
    assert effective_max_model_len(EngineConfig(max_model_len=configured), properties) == limit


def test_a_limit_cut_by_the_kv_cache_is_told(caplog: pytest.LogCaptureFixture) -> None:
    properties = make_properties(num_blocks=32)
    with caplog.at_level(logging.WARNING):
        effective_max_model_len(EngineConfig(), properties)
    assert "max_model_len_cut from=64 to=33" in caplog.text


def test_a_limit_that_fits_is_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        effective_max_model_len(EngineConfig(), make_properties(num_blocks=63))
    assert not caplog.records
