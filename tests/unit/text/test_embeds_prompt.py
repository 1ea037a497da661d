"""Prompts of embeddings on the client's side: what is sent, and what is refused before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trio_engine.errors import RequestError
from trio_engine.sampling_params import SamplingParams
from trio_engine.tensors import TensorData
from trio_engine.text.embeds_prompt import EmbedsPrompt
from trio_engine.text.processor import PreparedPrompt, TextProcessor

ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)
PROCESSOR = TextProcessor(None, max_model_len=8, vocab_size=50)


def prepare(prompt: EmbedsPrompt, **options: Any) -> PreparedPrompt:
    return PROCESSOR.prepare(prompt, SamplingParams(max_tokens=None, **options))


def test_embeddings_alone_have_no_token_ids() -> None:
    prepared = prepare(EmbedsPrompt(embeds=ARRAY))
    assert prepared.prompt_token_ids is None
    assert prepared.prompt_is_token_ids is None
    assert prepared.prompt_embeds == TensorData.from_numpy(ARRAY)
    assert prepared.num_prompt_tokens == 3
    assert prepared.params.max_tokens == 5


def test_an_array_may_change_after_it_was_sent() -> None:
    array = ARRAY.copy()
    prepared = prepare(EmbedsPrompt(embeds=array))
    array[:] = 0
    assert prepared.prompt_embeds == TensorData.from_numpy(ARRAY)


def test_a_tensor_goes_as_it_is() -> None:
    tensor = TensorData("bfloat16", (3, 4), bytes(24))
    assert prepare(EmbedsPrompt(embeds=tensor)).prompt_embeds is tensor


def test_a_mixed_prompt_says_which_counts() -> None:
    is_token_ids = [True, False, True]
    prompt = EmbedsPrompt(embeds=ARRAY, token_ids=[7, 0, 9], is_token_ids=is_token_ids)
    prepared = prepare(prompt)
    assert prepared.prompt_token_ids == [7, 0, 9]
    assert prepared.prompt_is_token_ids == is_token_ids


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (
            {"embeds": ARRAY.astype(np.float64)},
            {},
            "embeds must be float32 or float16, got float64",
        ),
        ({"embeds": ARRAY[0]}, {}, r"embeds must have the shape \[num_tokens, hidden\], got \[4\]"),
        ({"embeds": ARRAY[:0]}, {}, "prompt must not be empty"),
        ({"embeds": np.zeros((8, 4), np.float32)}, {}, r"shorter than max_model_len \(8 tokens\)"),
        ({"embeds": ARRAY, "token_ids": [1, 2, 3]}, {}, "is_token_ids must be 3, .* got None"),
        ({"embeds": ARRAY, "is_token_ids": [True] * 3}, {}, "token_ids must be 3, .* got None"),
        (
            {"embeds": ARRAY, "token_ids": [1, 2], "is_token_ids": [True] * 3},
            {},
            "token_ids must be 3, as many as embeds, got 2",
        ),
        (
            {"embeds": ARRAY, "token_ids": [1, 2, 50], "is_token_ids": [True] * 3},
            {},
            "token_ids must be token ids, 0 to 49, got 50 at place 2",
        ),
        ({"embeds": ARRAY}, {"prompt_logprobs": 0}, "prompt_logprobs must be None for embeddings"),
    ],
)
def test_what_cannot_be_served_is_named(
    fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        prepare(EmbedsPrompt(**fields), **options)
