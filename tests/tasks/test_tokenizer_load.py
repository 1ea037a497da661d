"""A tokenizer loads beside its engine's start, and its fault shows where it is wanted."""

from __future__ import annotations

import pytest
import trio

from trio_engine.client.tokenizer_load import TokenizerLoad
from trio_engine.errors import ModelError


async def test_no_model_needs_no_tokenizer() -> None:
    load = TokenizerLoad(None)
    await load.run()
    assert await load.wait_loaded() is None


async def test_a_missing_model_is_told_to_whoever_waits() -> None:
    load = TokenizerLoad("/no/such/model")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            with pytest.raises(ModelError, match="/no/such/model"):
                await load.wait_loaded()


@pytest.mark.slow
async def test_the_built_in_models_tokenizer() -> None:
    load = TokenizerLoad("smollm2")
    with trio.fail_after(60):
        await load.run()
        tokenizer = await load.wait_loaded()
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Paris")) == "Paris"
