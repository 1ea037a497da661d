"""Prompts of ids, of embeddings and of both: what is refused, and what the core makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.core.core_parts import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    add,
    make_driver,
    make_request,
    make_source,
)
from trio_engine.core.prompt import NO_ID, check_prompt
from trio_engine.errors import RequestError
from trio_engine.executor.kv_checking import HIDDEN_SIZE
from trio_engine.outputs import FinishReason
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    from trio_engine.requests import EngineCoreRequest


def embeds(num_tokens: int, *, seed: int = 0, dtype: str = "float32") -> TensorData:
    values = np.random.default_rng(seed).normal(size=(num_tokens, HIDDEN_SIZE)).astype(np.float32)
    if dtype == "bfloat16":
        bits = (values.view(np.uint32) >> 16).astype("<u2")
        return TensorData("bfloat16", values.shape, bits.tobytes())
    return TensorData.from_numpy(values.astype(dtype))


def make_embeds_source(
    request_id: str = "r", num_tokens: int = 3, *, seed: int = 0, **options: Any
) -> EngineCoreRequest:
    fields = {"prompt_token_ids": None, "prompt_embeds": embeds(num_tokens, seed=seed)}
    return make_source(
        request_id, source_fields={**fields, **options.pop("source_fields", {})}, **options
    )


def check(source: EngineCoreRequest, hidden_size: int | None = HIDDEN_SIZE) -> None:
    check_prompt(
        source, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, hidden_size=hidden_size
    )


def refusal(source: EngineCoreRequest, hidden_size: int | None = HIDDEN_SIZE) -> str:
    with pytest.raises(RequestError) as caught:
        check(source, hidden_size)
    return str(caught.value)


MIXED = {"prompt_token_ids": [7, 8, 9], "prompt_is_token_ids": [True, False, True]}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embeddings_alone_are_a_prompt(dtype: str) -> None:
    check(make_embeds_source(source_fields={"prompt_embeds": embeds(3, dtype=dtype)}))
    check(make_embeds_source(num_tokens=MAX_MODEL_LEN - 1))


def test_ids_and_embeddings_may_be_mixed() -> None:
    check(make_embeds_source(source_fields=MIXED))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"prompt_embeds": TensorData("int64", (3, HIDDEN_SIZE), bytes(3 * HIDDEN_SIZE * 8))},
            "prompt_embeds is of int64, not float32, bfloat16, float16",
        ),
        (
            {"prompt_embeds": TensorData("float32", (3, 5), bytes(60))},
            "prompt_embeds has shape [3, 5], not [tokens, 4]",
        ),
        (
            {"prompt_embeds": TensorData("float32", (4,), bytes(16))},
            "prompt_embeds has shape [4], not [tokens, 4]",
        ),
        (
            {"prompt_embeds": TensorData("float32", (0, HIDDEN_SIZE), b"")},
            "prompt_embeds is empty",
        ),
        (
            {"prompt_embeds": embeds(MAX_MODEL_LEN)},
            f"prompt of {MAX_MODEL_LEN} tokens does not leave room for an output token:"
            f" max_model_len is {MAX_MODEL_LEN}",
        ),
        (
            {"prompt_token_ids": [1, 2, 3]},
            "prompt_embeds of 3 tokens beside prompt_token_ids of 3"
            " and prompt_is_token_ids of None",
        ),
        (
            {"prompt_is_token_ids": [True, True, False]},
            "prompt_embeds of 3 tokens beside prompt_token_ids of None"
            " and prompt_is_token_ids of 3",
        ),
        (
            {**MIXED, "prompt_token_ids": [1, 2]},
            "prompt_embeds of 3 tokens beside prompt_token_ids of 2 and prompt_is_token_ids of 3",
        ),
        (
            {**MIXED, "prompt_token_ids": [7, 8, VOCAB_SIZE]},
            f"prompt_token_ids holds {VOCAB_SIZE}: ids run from 0 to {VOCAB_SIZE - 1}",
        ),
        (
            {**MIXED, "prompt_embeds": None},
            "prompt_is_token_ids without prompt_embeds",
        ),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_field_and_value(
    fields: dict[str, Any], expected: str
) -> None:
    assert refusal(make_embeds_source(source_fields=fields)) == expected


def test_an_executor_that_takes_no_embeddings_is_sent_none() -> None:
    source = make_embeds_source()
    assert refusal(source, None) == "prompt_embeds is not supported by this engine"


def test_an_id_under_an_embedding_does_not_count() -> None:
    request = make_request("r", source_fields={"prompt_embeds": embeds(3), **MIXED})
    assert list(request.token_ids) == [7, NO_ID, 9]
    assert request.num_prompt_tokens == 3
    check(make_embeds_source(source_fields={**MIXED, "prompt_token_ids": [7, VOCAB_SIZE, 9]}))


def test_embeddings_alone_have_a_place_for_each_token() -> None:
    fields = {"prompt_token_ids": None, "prompt_embeds": embeds(5)}
    request = make_request("r", source_fields=fields, max_tokens=4)
    assert list(request.token_ids) == [NO_ID] * 5
    assert request.max_total_tokens == 9


def test_prompt_logprobs_of_embeddings_are_refused() -> None:
    driver = make_driver()
    log = add(driver, make_embeds_source(prompt_logprobs=1))
    driver.run_until_idle()
    assert log.finish_reason is FinishReason.ERROR
    assert log.outputs[-1].stop_reason == "prompt_logprobs cannot be told of prompt_embeds"


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_embeddings_survive_chunks_preemption_and_the_prefix_cache(launches_ahead: bool) -> None:
    """Equal and unequal prompts side by side give what each gives alone, with nothing cached."""
    sources = []
    for index in range(12):
        seed, num_tokens = index % 3, 9 + 4 * (index % 2)
        is_token = [position % 3 == index % 2 for position in range(num_tokens)]
        mixed = {"prompt_token_ids": list(range(num_tokens)), "prompt_is_token_ids": is_token}
        sources.append(
            make_embeds_source(
                f"r{index}",
                num_tokens,
                seed=seed,
                max_tokens=8,
                logprobs=1,
                source_fields=mixed if index % 4 < 2 else {},
            )
        )

    def alone(source: EngineCoreRequest) -> list[int]:
        driver = make_driver(pipeline_depth=1, enable_prefix_caching=False)
        log = add(driver, source)
        driver.run_until_idle()
        return log.token_ids

    driver = make_driver(
        launches_ahead=launches_ahead,
        block_size=2,
        num_blocks=24,
        max_num_batched_tokens=10,
        max_num_seqs=6,
    )
    logs = [add(driver, source) for source in sources]
    driver.run_until_idle()
    statistics = driver.core.statistics()
    assert statistics.num_preemptions
    assert statistics.num_prefix_cache_hits
    assert [log.token_ids for log in logs] == [alone(source) for source in sources]
    assert len({tuple(log.token_ids) for log in logs}) > 4
