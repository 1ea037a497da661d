"""What can never be served is refused by field and value, and costs nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.core.core_parts import MAX_MODEL_LEN, VOCAB_SIZE, make_source
from trio_engine.core.admission import (
    UNSUPPORTED_REQUEST_FIELDS,
    UNSUPPORTED_SAMPLING_FIELDS,
    check_request,
)
from trio_engine.errors import RequestError
from trio_engine.requests import EngineCoreRequest, LoRARequest
from trio_engine.sampling_params import SamplingParams, StructuredOutputsParams
from trio_engine.tensors import TensorData

REQUEST_FIELDS: dict[str, Any] = {
    "pooling_params": [],
    "mm_features": [{"modality": "image"}],
    "resumable": True,
    "lora_request": LoRARequest("a", 1),
    "prompt_embeds": TensorData("float32", (0, 4), b""),
    "prompt_is_token_ids": [True],
}
SAMPLING_FIELDS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "logprob_token_ids": [1],
    "structured_outputs": StructuredOutputsParams(regex="a"),
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1],
    "bad_words_token_ids": [[1]],
    "thinking_token_budget": 5,
}


def check(request: EngineCoreRequest) -> SamplingParams:
    return check_request(request, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


def refusal(request: EngineCoreRequest) -> str:
    with pytest.raises(RequestError) as caught:
        check(request)
    return str(caught.value)


def test_a_request_that_can_be_served_gives_its_parameters() -> None:
    request = make_source(
        prompt=[0, VOCAB_SIZE - 1], stop_token_ids=[0, VOCAB_SIZE - 1], eos_token_id=VOCAB_SIZE - 1
    )
    assert check(request) is request.sampling_params


@pytest.mark.parametrize("name", UNSUPPORTED_REQUEST_FIELDS)
def test_a_request_field_that_is_not_served_is_refused_by_name(name: str) -> None:
    request = make_source(source_fields={name: REQUEST_FIELDS[name]})
    assert refusal(request) == f"{name} is not supported by this engine"


@pytest.mark.parametrize("name", UNSUPPORTED_SAMPLING_FIELDS)
def test_a_sampling_field_that_is_not_served_is_refused_by_name(name: str) -> None:
    field = {"bad_words": "bad_words_token_ids"}.get(name, name)
    request = make_source(**{field: SAMPLING_FIELDS[field]})
    assert refusal(request) == f"{name} is not supported by this engine"


@pytest.mark.parametrize(
    "options",
    [
        {"source_fields": {"mm_features": []}},
        {"logit_bias": {}},
        {"bad_words_token_ids": []},
        {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        {"temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 5},
        {"stop": ["x"], "ignore_eos": True, "detokenize": False},
    ],
)
def test_empty_forms_and_what_is_served_pass(options: dict[str, Any]) -> None:
    check(make_source(**options))


def test_sampling_params_are_needed() -> None:
    request = make_source(source_fields={"sampling_params": None})
    assert refusal(request) == "sampling_params is missing"


@pytest.mark.parametrize("prompt", [None, []])
def test_an_empty_prompt_is_refused(prompt: list[int] | None) -> None:
    request = make_source(source_fields={"prompt_token_ids": prompt})
    assert refusal(request) == "prompt_token_ids is empty"


def test_a_prompt_must_leave_room_for_one_output_token() -> None:
    check(make_source(prompt=[1] * (MAX_MODEL_LEN - 1)))
    message = refusal(make_source(prompt=[1] * MAX_MODEL_LEN))
    assert f"prompt of {MAX_MODEL_LEN} tokens" in message
    assert f"max_model_len is {MAX_MODEL_LEN}" in message


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, 2**31, -(2**40)])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_prompt_id_outside_the_vocabulary_is_refused_wherever_it_stands(
    bad: int, place: int
) -> None:
    prompt = [5, 6, 7]
    prompt[place] = bad
    assert refusal(make_source(prompt=prompt)) == (
        f"prompt_token_ids holds {bad}: ids run from 0 to {VOCAB_SIZE - 1}"
    )


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
def test_a_stop_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    expected = f"holds {bad}: ids run from 0 to {VOCAB_SIZE - 1}"
    assert refusal(make_source(stop_token_ids=[5, bad])) == f"stop_token_ids {expected}"
    assert refusal(make_source(all_stop_token_ids={5, bad})) == f"stop_token_ids {expected}"
    assert refusal(make_source(eos_token_id=bad)) == f"_eos_token_id {expected}"
