"""What can never be served is refused by field and value, and costs nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.core.core_parts import MAX_MODEL_LEN, VOCAB_SIZE, make_source
from trio_engine.core.admission import (
    UNSUPPORTED_REQUEST_FIELDS,
    UNSUPPORTED_SAMPLING_FIELDS,
    Admission,
)
from trio_engine.errors import RequestError
from trio_engine.requests import EngineCoreRequest, LoRARequest
from trio_engine.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from trio_engine.sampling_params import SamplingParams

REQUEST_FIELDS: dict[str, Any] = {
    "pooling_params": [],
    "mm_features": [{"modality": "image"}],
    "resumable": True,
    "lora_request": LoRARequest("a", 1),
}
SAMPLING_FIELDS: dict[str, Any] = {
    "thinking_token_budget": 5,
}


def check(request: EngineCoreRequest) -> SamplingParams:
    return Admission(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN).check_request(request)


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
    request = make_source(**{name: SAMPLING_FIELDS[name]})
    assert refusal(request) == f"{name} is not supported by this engine"


@pytest.mark.parametrize(
    "options",
    [
        {"source_fields": {"mm_features": []}},
        {"logit_bias": {}},
        {"bad_words_token_ids": []},
        {"repetition_penalty": 1.5, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: 100.0, VOCAB_SIZE - 1: -math.inf}},
        {"bad_words_token_ids": [[0], [VOCAB_SIZE - 1, 3]]},
        {"allowed_token_ids": [0, VOCAB_SIZE - 1], "bad_words_token_ids": [[0], [3, 3]]},
        {"allowed_token_ids": [3], "all_stop_token_ids": {3}},
        {"temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 5},
        {"stop": ["x"], "ignore_eos": True, "detokenize": False},
        {"logprobs": 0, "prompt_logprobs": -1, "logprob_token_ids": []},
        {"logprobs": VOCAB_SIZE, "prompt_logprobs": VOCAB_SIZE},
        {"logprob_token_ids": [0, VOCAB_SIZE - 1] * 64},
        {"logprob_token_ids": [7, 7], "logprobs": 2},
    ],
)
def test_empty_forms_and_what_is_served_pass(options: dict[str, Any]) -> None:
    check(make_source(**options))


def test_sampling_params_are_needed() -> None:
    request = make_source(source_fields={"sampling_params": None})
    assert refusal(request) == "sampling_params is missing"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_time_that_orders_nothing_is_refused(value: float) -> None:
    request = make_source(source_fields={"arrival_time": value})
    assert refusal(request) == f"arrival_time must be finite, got {value}"


@pytest.mark.parametrize("prompt", [None, []])
def test_an_empty_prompt_is_refused(prompt: list[int] | None) -> None:
    request = make_source(source_fields={"prompt_token_ids": prompt})
    assert refusal(request) == "prompt_token_ids is empty"


def test_a_prompt_must_leave_room_for_one_output_token() -> None:
    check(make_source(prompt=[1] * (MAX_MODEL_LEN - 1)))
    message = refusal(make_source(prompt=[1] * MAX_MODEL_LEN))
    assert f"prompt of {MAX_MODEL_LEN} tokens" in message
    assert f"max_model_len is {MAX_MODEL_LEN}" in message


@pytest.mark.known_fault(kind="token-out-of-range")
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


@pytest.mark.known_fault(kind="token-out-of-range")
@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE])
def test_a_stop_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    expected = f"holds {bad}: ids run from 0 to {VOCAB_SIZE - 1}"
    assert refusal(make_source(stop_token_ids=[5, bad])) == f"stop_token_ids {expected}"
    assert refusal(make_source(all_stop_token_ids={5, bad})) == f"stop_token_ids {expected}"
    assert refusal(make_source(eos_token_id=bad)) == f"_eos_token_id {expected}"


@pytest.mark.known_fault(kind="wrong-logprobs")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"logprobs": 513}, "logprobs is 513: the vocabulary has 512 tokens"),
        ({"prompt_logprobs": 513}, "prompt_logprobs is 513: the vocabulary has 512 tokens"),
        (
            {"logprob_token_ids": [3, 512]},
            "logprob_token_ids holds 512: ids run from 0 to 511",
        ),
        (
            {"logprob_token_ids": [3, -1]},
            "logprob_token_ids holds -1: ids run from 0 to 511",
        ),
        (
            {"logprob_token_ids": [3] * 129},
            "logprob_token_ids has 129 ids, at most 128 are served",
        ),
        (
            {"logprob_token_ids": [3, 4], "logprobs": 5},
            "logprobs is 5 beside 2 logprob_token_ids",
        ),
    ],
)
def test_log_probabilities_that_there_are_not_are_refused(
    options: dict[str, Any], expected: str
) -> None:
    assert refusal(make_source(**options)) == expected


@pytest.mark.known_fault(kind="token-out-of-range")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"logit_bias": {3: 1.0, 512: 5.0}}, "logit_bias holds 512: ids run from 0 to 511"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias holds -1: ids run from 0 to 511"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        (
            {"allowed_token_ids": [5, 512]},
            "allowed_token_ids holds 512: ids run from 0 to 511",
        ),
        ({"allowed_token_ids": [-2]}, "allowed_token_ids holds -2: ids run from 0 to 511"),
        (
            {"bad_words_token_ids": [[1, 2], [3, 512]]},
            "_bad_words_token_ids holds 512: ids run from 0 to 511",
        ),
        (
            {"bad_words_token_ids": [[-1]]},
            "_bad_words_token_ids holds -1: ids run from 0 to 511",
        ),
        (
            {"bad_words_token_ids": [[1], []]},
            "_bad_words_token_ids holds a word without tokens",
        ),
    ],
)
def test_named_tokens_outside_the_vocabulary_are_refused(
    options: dict[str, Any], expected: str
) -> None:
    assert refusal(make_source(**options)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words_token_ids": [[5], [6]]},
        {"bad_words_token_ids": [[5]], "min_tokens": 1, "all_stop_token_ids": {6}},
        {"min_tokens": 1, "stop_token_ids": [6], "eos_token_id": 5},
    ],
)
def test_options_that_together_allow_no_token_are_refused(options: dict[str, Any]) -> None:
    assert refusal(make_source(allowed_token_ids=[5, 6, 5], **options)) == (
        "bad_words and min_tokens leave nothing of allowed_token_ids"
    )
    check(make_source(allowed_token_ids=[5, 6, 7], **options))


def test_a_grammar_after_reasoning_is_refused() -> None:
    structured = StructuredOutputsParams(regex="a")
    request = make_source(structured_outputs=structured, source_fields={"reasoning_ended": False})
    assert refusal(request) == "structured_outputs after reasoning is not supported by this engine"
    for ended in (True, None):
        check(make_source(structured_outputs=structured, source_fields={"reasoning_ended": ended}))
    check(make_source(source_fields={"reasoning_ended": False}))
