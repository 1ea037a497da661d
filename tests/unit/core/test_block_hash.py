"""Equal hashes mean equal keys and values: nothing that changes them is left out."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.unit.core.core_parts import make_request
from trio_engine.core.block_hash import HASH_BYTES, BlockHasher
from trio_engine.requests import LoRARequest
from trio_engine.tensors import TensorData

BLOCK_SIZE = 4
PROMPT = list(range(10, 22))


def hashes(prompt: list[int] = PROMPT, **fields: Any) -> list[bytes]:
    """Of all full blocks of a prompt."""
    request = make_request("r", prompt, source_fields=fields)
    hasher = BlockHasher(BLOCK_SIZE)
    return hasher.hashes(request, len(prompt) // BLOCK_SIZE)


def embeds(*rows: float, dtype: str = "float32") -> TensorData:
    """One row for each number, of width 2."""
    return TensorData.from_numpy(np.array([[row, row] for row in rows], dtype=dtype))


def test_requests_that_begin_alike_have_equal_hashes_as_far_as_they_do() -> None:
    first, second = hashes(), hashes([*PROMPT[:8], 99, *PROMPT[9:]])
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert {len(block_hash) for block_hash in first} == {HASH_BYTES}


def test_a_block_with_equal_tokens_behind_other_ones_is_another_block() -> None:
    assert hashes([1, *PROMPT[1:]])[1:] != hashes()[1:]
    same_tokens = hashes([7] * 12)
    assert len(set(same_tokens)) == 3


def test_only_full_blocks_have_a_hash() -> None:
    with pytest.raises(AssertionError, match="does not fill its block 1"):
        BlockHasher(BLOCK_SIZE).hashes(make_request("r", PROMPT[:7]), 2)


def test_hashes_are_made_once_and_go_on_with_the_output() -> None:
    request, hasher = make_request("r", PROMPT[:6]), BlockHasher(BLOCK_SIZE)
    first = hasher.hashes(request, 1)[0]
    request.token_ids.extend(PROMPT[6:])
    assert hasher.hashes(request, 3)[2] == hashes()[2]
    assert hasher.hashes(request, 1)[0] is first
    assert len(request.block_hashes) == 3


SOURCES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an empty salt": {"cache_salt": ""},
    "a salt": {"cache_salt": "x"},
    "another salt": {"cache_salt": "y"},
    "an adapter with the salt's name": {"lora_request": LoRARequest("x", 1)},
    "another id of the adapter": {"lora_request": LoRARequest("x", 2)},
    "another folder of the adapter": {"lora_request": LoRARequest("x", 1, "/there")},
    "both": {"cache_salt": "x", "lora_request": LoRARequest("x", 1)},
    "embeddings": {"prompt_embeds": embeds(*PROMPT)},
    "embeddings of another type": {"prompt_embeds": embeds(*PROMPT, dtype="float16")},
    "embeddings with a salt": {"prompt_embeds": embeds(*PROMPT), "cache_salt": "x"},
}


def test_no_two_sources_share_a_block() -> None:
    by_source = {name: hashes(**fields) for name, fields in SOURCES.items()}
    everything = [block_hash for each in by_source.values() for block_hash in each]
    assert len(set(everything)) == 3 * len(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_equal_sources_share_their_blocks(name: str) -> None:
    assert hashes(**SOURCES[name]) == hashes(**SOURCES[name])


def test_a_salt_cannot_be_chosen_to_look_like_what_comes_before_a_block() -> None:
    """Roots and blocks are hashed in different ways, so that no text has the same hash as both."""
    root = make_request("r", source_fields={"cache_salt": "x"}).root_hash
    as_a_block = blake2b(msgspec.msgpack.encode(("x", None, None)), digest_size=HASH_BYTES)
    assert root != as_a_block.digest()
    assert root not in hashes(cache_salt="x")


def test_embeddings_count_where_they_are_and_ids_where_these_are() -> None:
    is_token = [True] * 4 + [False] * 8
    mixed: dict[str, Any] = {"prompt_embeds": embeds(*PROMPT), "prompt_is_token_ids": is_token}
    base = hashes(**mixed)
    # Under a token an embedding is never looked at.
    under_a_token = embeds(0.5, *PROMPT[1:])
    assert hashes(**(mixed | {"prompt_embeds": under_a_token})) == base
    in_the_second_block = embeds(*PROMPT[:5], 0.5, *PROMPT[6:])
    changed = hashes(**(mixed | {"prompt_embeds": in_the_second_block}))
    assert changed[0] == base[0]
    assert changed[1] != base[1]
    assert changed[2] != base[2]
    other_kinds = hashes(**(mixed | {"prompt_is_token_ids": [True] * 5 + [False] * 7}))
    assert other_kinds[0] == base[0]
    assert other_kinds[1] != base[1]


def test_blocks_of_the_output_behind_embeddings_are_hashed_by_their_tokens() -> None:
    request = make_request("r", PROMPT[:6], source_fields={"prompt_embeds": embeds(*PROMPT[:6])})
    other = make_request("r", PROMPT[:6], source_fields={"prompt_embeds": embeds(*PROMPT[:6])})
    request.token_ids.extend([1, 2, 3, 4, 5, 6])
    other.token_ids.extend([1, 2, 3, 4, 5, 7])
    hasher = BlockHasher(BLOCK_SIZE)
    assert hasher.hashes(request, 2)[1] == hasher.hashes(other, 2)[1]
    assert hasher.hashes(request, 3)[2] != hasher.hashes(other, 3)[2]


@given(st.data())
def test_two_prompts_share_exactly_the_blocks_of_what_they_have_in_common(
    data: st.DataObject,
) -> None:
    token_ids = st.integers(0, 2)
    first = data.draw(st.lists(token_ids, min_size=12, max_size=12))
    second = data.draw(st.lists(token_ids, min_size=12, max_size=12))
    shared = [first[: 4 * n] == second[: 4 * n] for n in (1, 2, 3)]
    pairs = zip(hashes(first), hashes(second), strict=True)
    assert [a == b for a, b in pairs] == shared
