"""Block tables grow with planned tokens, and one request always fits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.unit.core.core_parts import make_properties, make_request
from trio_engine.config import EngineConfig
from trio_engine.core.kv_cache import KVCacheManager, effective_max_model_len

if TYPE_CHECKING:
    from trio_engine.core.request import Request


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


# Using blocks again


def make_cache(num_blocks: int = 8, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size)


def serve(cache: KVCacheManager, request: Request) -> None:
    """Computes a request's prompt, which has settled, and ends it."""
    assert cache.admit(request)
    cache.cache_blocks(request, request.num_prompt_tokens)
    cache.free(request)


@pytest.mark.known_fault(kind="wrong-cache-hit")
@pytest.mark.parametrize(
    ("prompt_length", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)]
)
def test_a_prompt_that_was_there_is_cached_in_full_blocks_but_never_its_last_token(
    prompt_length: int, num_cached: int
) -> None:
    cache = make_cache()
    serve(cache, make_request("a", prompt_length))
    request = make_request("b", prompt_length)
    assert cache.admit(request)
    assert (request.num_cached_tokens, request.num_planned_tokens) == (num_cached, num_cached)
    assert len(request.block_ids) == -(-prompt_length // 4)
    cache.check_integrity([request])


def test_what_two_requests_share_is_held_by_both() -> None:
    cache = make_cache()
    first, second = make_request("a", 9), make_request("b", 9)
    assert cache.admit(first)
    cache.cache_blocks(first, 9)
    assert cache.admit(second)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    cache.check_integrity([first, second])
    cache.free(first)
    cache.check_integrity([second])
    assert cache.usage == 3 / 8


def test_the_first_block_that_is_not_there_ends_what_is_cached() -> None:
    cache = make_cache()
    serve(cache, make_request("a", [*range(4), 100, *range(5, 12), 0]))
    request = make_request("b", 12)
    assert cache.admit(request)
    assert request.num_cached_tokens == 4


def test_cached_blocks_that_others_hold_need_no_room_and_free_ones_do() -> None:
    cache = make_cache(num_blocks=4)
    first = make_request("a", 12)
    assert cache.admit(first)
    cache.cache_blocks(first, 12)
    second = make_request("b", [*range(12), 50])
    assert cache.admit(second)  # three of first's, and the one that was left
    assert cache.usage == 1.0
    cache.free(second)
    cache.free(first)
    third = make_request("c", [*range(12), *range(60, 65)])
    before = cache.pool.num_cached_blocks
    assert not cache.admit(third)  # five blocks of four: those that it would find are free ones
    assert (third.block_ids, cache.usage, cache.pool.num_cached_blocks) == ([], 0.0, before)


@pytest.mark.known_fault(kind="wrong-cache-hit")
def test_what_a_request_finds_is_not_evicted_to_make_room_for_the_rest_of_it() -> None:
    cache = make_cache(num_blocks=4)
    serve(cache, make_request("a", 9))
    serve(cache, make_request("other", [100] * 5))
    request = make_request("b", [*range(8), *range(50, 58)])
    assert cache.admit(request)
    assert request.num_cached_tokens == 8
    assert len(set(request.block_ids)) == 4
    cache.check_integrity([request])


def test_the_end_of_a_request_is_evicted_before_its_beginning() -> None:
    cache = make_cache(num_blocks=4)
    serve(cache, make_request("a", 13))
    other = make_request("other", [100] * 6)
    assert cache.admit(other)  # one block that nobody could find, and one of a's three
    again = make_request("a", 9)
    assert cache.admit(again) is False
    cache.free(other)
    assert cache.admit(again)
    assert again.num_cached_tokens == 8


def test_a_prompt_computed_twice_at_once_is_cached_once() -> None:
    cache = make_cache()
    first, second = make_request("a", 9), make_request("b", 9)
    assert cache.admit(first)
    assert cache.admit(second)
    cache.cache_blocks(first, 9)
    cache.cache_blocks(second, 9)
    assert cache.pool.num_cached_blocks == 2
    cache.check_integrity([first, second])
    cache.free(first)
    third = make_request("c", 9)
    assert cache.admit(third)
    assert third.num_cached_tokens == 8


def test_a_request_that_must_not_read_finds_nothing_but_leaves_its_blocks() -> None:
    cache = make_cache()
    for options in ({"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}):
        request = make_request("a", 9, **options)
        serve(cache, request)
        again = make_request("b", 9, **options)
        assert cache.admit(again)
        assert again.num_cached_tokens == 0
        cache.free(again)
    reader = make_request("c", 9)
    assert cache.admit(reader)
    assert reader.num_cached_tokens == 8


def test_prompt_logprobs_read_nothing_even_where_reading_is_asked_for() -> None:
    cache = make_cache()
    serve(cache, make_request("a", 9))
    request = make_request("b", 9, prompt_logprobs=1, skip_reading_prefix_cache=False)
    assert cache.admit(request)
    assert request.num_cached_tokens == 0


def test_without_a_prefix_cache_nothing_is_hashed_or_found() -> None:
    cache = KVCacheManager(8, 4, enable_prefix_caching=False)
    for name in "ab":
        request = make_request(name, 9)
        serve(cache, request)
        assert (request.block_hashes, request.num_cached_tokens) == ([], 0)
    assert cache.pool.num_cached_blocks == 0


def test_a_reset_forgets_everything_once_nobody_holds_a_block() -> None:
    cache = make_cache()
    request = make_request("a", 9)
    assert cache.admit(request)
    cache.cache_blocks(request, 9)
    assert cache.reset_prefix_cache() is False
    assert cache.pool.num_cached_blocks == 2
    cache.free(request)
    assert cache.reset_prefix_cache() is True
    again = make_request("b", 9)
    assert cache.admit(again)
    assert again.num_cached_tokens == 0


def test_the_integrity_check_finds_a_block_that_is_cached_as_something_else() -> None:
    cache = make_cache()
    request = make_request("a", 9)
    assert cache.admit(request)
    cache.pool.cache([request.block_ids[0]], [b"something else"])
    with pytest.raises(AssertionError, match="holds what block"):
        cache.check_integrity([request])


# The integrity check


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
