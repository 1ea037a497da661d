"""Adapters as a client sees them: calls, and requests that name one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from trio_engine.client.inproc_client import open_inproc_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import RequestFailedError, UtilityError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.requests import LoRARequest
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.client.base import EngineClient

TEST_TIMEOUT_S = 20.0
FOUR_TOKENS = SamplingParams(temperature=0.0, max_tokens=4)
PROMPT = list(range(40))


def adapter(lora_id: int, path: str | None = None, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest(f"a{lora_id}", lora_id, path or f"/{lora_id}", load_inplace=load_inplace)


@asynccontextmanager
async def open_engine_with_adapters(max_loras: int) -> AsyncIterator[EngineClient]:
    config = EngineConfig(
        executor="kv-checking",
        num_blocks=64,
        max_model_len=256,
        enable_lora=True,
        max_loras=max_loras,
    )
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_inproc_engine(config, KVCheckingExecutor) as engine:
            yield engine


async def test_adapters_are_added_listed_pinned_and_removed() -> None:
    async with open_engine_with_adapters(2) as engine:
        assert await engine.call_utility("list_loras") == set()
        for lora_id in (1, 2):
            assert await engine.call_utility("add_lora", adapter(lora_id)) is True
        assert await engine.call_utility("pin_lora", 1) is True
        assert await engine.call_utility("add_lora", adapter(3)) is True
        assert await engine.call_utility("list_loras") == {1, 3}
        assert await engine.call_utility("remove_lora", 1) is True
        assert await engine.call_utility("remove_lora", 1) is False
        for method, argument, reason in (
            ("pin_lora", 2, "adapter 2 is not here"),
            ("add_lora", adapter(0), "lora_int_id must be 1 or more, got 0"),
            ("add_lora", adapter(3, "/elsewhere"), "id 3 is that of adapter 'a3' in /3"),
        ):
            with pytest.raises(UtilityError, match=reason):
                await engine.call_utility(method, argument)


async def test_a_request_loads_its_adapter_and_gets_its_tokens() -> None:
    async with open_engine_with_adapters(1) as engine:
        base = await engine.complete(PROMPT, FOUR_TOKENS)
        first = await engine.complete(PROMPT, FOUR_TOKENS, lora_request=adapter(1))
        again = await engine.complete(PROMPT, FOUR_TOKENS, lora_request=adapter(1))
        other = await engine.complete(PROMPT, FOUR_TOKENS, lora_request=adapter(2))
        assert await engine.call_utility("list_loras") == {2}
        assert first.token_ids == again.token_ids
        assert len({tuple(each.token_ids) for each in (base, first, other)}) == 3
        # Each has a prefix cache of its own.
        assert [each.num_cached_tokens for each in (base, first, again, other)] == [0, 0, 32, 0]


async def test_what_another_adapter_of_the_same_name_computed_is_not_found() -> None:
    async with open_engine_with_adapters(1) as engine:
        await engine.complete(PROMPT, FOUR_TOKENS, lora_request=adapter(1))
        await engine.call_utility("add_lora", adapter(1, load_inplace=True))
        replaced = await engine.complete(PROMPT, FOUR_TOKENS, lora_request=adapter(1))
        await engine.call_utility("remove_lora", 1)
        added_again = await engine.complete(PROMPT, FOUR_TOKENS, lora_request=adapter(1))
        kept = await engine.complete(PROMPT, FOUR_TOKENS, lora_request=adapter(1))
        assert [each.num_cached_tokens for each in (replaced, added_again, kept)] == [0, 0, 32]


async def test_an_adapter_in_use_is_not_removed() -> None:
    params = SamplingParams(max_tokens=200, output_kind=RequestOutputKind.DELTA, ignore_eos=True)
    async with open_engine_with_adapters(1) as engine:
        async with engine.generate([1, 2], params, lora_request=adapter(1)) as stream:
            await anext(stream)
            with pytest.raises(UtilityError, match="adapter 1 is in use"):
                await engine.call_utility("remove_lora", 1)
        assert await engine.call_utility("remove_lora", 1) is True


async def test_an_adapter_that_cannot_be_had_ends_its_own_request_alone() -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=200, output_kind=RequestOutputKind.DELTA, ignore_eos=True
    )
    async with open_engine_with_adapters(1) as engine:
        await engine.call_utility("add_lora", adapter(1))
        await engine.call_utility("pin_lora", 1)
        async with engine.generate([1, 2], params) as stream:
            await anext(stream)
            with pytest.raises(RequestFailedError, match="all 1 places"):
                await engine.complete([1], FOUR_TOKENS, lora_request=adapter(2))
            tokens = [token async for item in stream for token in item.token_ids]
        assert len(tokens) > 100
        assert (await engine.complete([1], FOUR_TOKENS, lora_request=adapter(1))).finished
