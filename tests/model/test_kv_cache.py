"""The KV cache: how large it gets, and that memory nobody wrote is not resident."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trio_engine.config import EngineConfig
from trio_engine.errors import ConfigError
from trio_engine.model.kv_cache import KVCache, KVCacheShape, choose_num_blocks

CPU = torch.device("cpu")
GIB = 1 << 30
SHAPE = KVCacheShape(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, item_size=4)


def choose(free_bytes: int, *, is_cpu: bool = True, max_model_len: int = 1 << 20, **o: Any) -> int:
    return choose_num_blocks(EngineConfig(**o), SHAPE, max_model_len, free_bytes, is_cpu=is_cpu)


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert SHAPE.layer_block_bytes == 16 * 2 * 2 * 64 * 4
    assert SHAPE.block_bytes == 4 * SHAPE.layer_block_bytes


def test_the_default_is_a_share_of_what_is_free() -> None:
    assert choose(64 * GIB) == GIB // SHAPE.block_bytes
    assert choose(GIB) == GIB // 2 // SHAPE.block_bytes
    assert choose(GIB, is_cpu=False) == int(0.9 * GIB) // SHAPE.block_bytes


def test_the_default_is_no_more_than_all_requests_can_fill() -> None:
    assert choose(64 * GIB, max_model_len=33, max_num_seqs=5) == 15


def test_options_go_before_the_default() -> None:
    assert choose(GIB, num_blocks=7, kv_cache_bytes=5) == 7
    assert choose(GIB, kv_cache_bytes=SHAPE.block_bytes * 3 + 1) == 3
    assert choose(8 * GIB, kv_cache_bytes=7 * GIB, max_num_seqs=1) == 7 * GIB // SHAPE.block_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 100_000}, "num_blocks 100000.* 65536 bytes, and 1073741824 bytes are free"),
        ({"kv_cache_bytes": 2 * GIB}, "kv_cache_bytes 2147483648: a KV cache of 32768 blocks"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes 1000: a KV cache of 0 blocks"),
    ],
)
def test_what_does_not_fit_is_a_config_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(GIB, **options)


def test_no_room_for_one_block_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="0 blocks"):
        choose(1000)


def make_cache(num_blocks: int) -> KVCache:
    return KVCache(SHAPE, num_blocks, CPU, torch.float32)


def test_tokens_come_back_from_where_they_were_written() -> None:
    cache = make_cache(8)
    tokens = torch.randn(3, 2, 2, 64)
    cache.write(2, torch.tensor([16 * 5, 16 * 5 + 1, 16]), tokens)
    gathered = cache.gather(2, torch.tensor([1, 5, cache.null_block], dtype=torch.int32))
    assert torch.equal(gathered[[16, 17, 0]], tokens)
    assert gathered.count_nonzero() == tokens.count_nonzero()
    assert not cache.gather(1, torch.tensor([1, 5])).any()


def test_cleared_blocks_are_zero_in_every_layer() -> None:
    cache = make_cache(3)
    for layer in range(4):
        cache.write(layer, torch.arange(48), torch.full((48, 2, 2, 64), torch.nan))
    cache.clear(torch.tensor([2, 0]))
    for layer in range(4):
        assert not cache.gather(layer, torch.tensor([0, 2])).any()
        assert cache.gather(layer, torch.tensor([1])).isnan().all()


def test_blocks_that_nobody_wrote_are_not_resident() -> None:
    before = resident_bytes()
    cache = make_cache(4 * GIB // SHAPE.block_bytes)
    cache.write(3, torch.tensor([1000]), torch.ones(1, 2, 2, 64))
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096
