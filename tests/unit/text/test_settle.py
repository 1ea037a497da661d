"""Options as they go to an engine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from trio_engine.errors import RequestError
from trio_engine.sampling_params import SamplingParams, StructuredOutputsParams
from trio_engine.text.gguf_tokenizer import build_gguf_tokenizer
from trio_engine.text.settle import RequestLimits, settle_params

if TYPE_CHECKING:
    from trio_engine.text.tokenizer import Tokenizer

LIMITS = RequestLimits(max_model_len=100, vocab_size=50, max_logprobs=20)


@pytest.fixture
def tokenizer(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    """Ends an output with 1, and also with 2."""
    return build_gguf_tokenizer(byte_level_metadata | {"tokenizer.ggml.eot_token_id": 2}, "made-up")


def settle(
    tokenizer: Tokenizer | None, *, limits: RequestLimits = LIMITS, **options: Any
) -> SamplingParams:
    return settle_params(SamplingParams(**options), 40, tokenizer, limits)


def test_max_tokens_is_what_the_prompt_leaves(tokenizer: Tokenizer) -> None:
    assert settle(tokenizer, max_tokens=None).max_tokens == 60
    assert settle(tokenizer, max_tokens=7).max_tokens == 7


def test_min_tokens_must_fit_what_the_prompt_leaves(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens \(60\), got 61"):
        settle(tokenizer, max_tokens=None, min_tokens=61)


@pytest.mark.known_fault(kind="lost-stop-rule")
def test_every_eos_ends_the_output(tokenizer: Tokenizer) -> None:
    params = settle(tokenizer, stop_token_ids=[9])
    assert params.eos_token_id == 1
    assert params.stop_token_ids == [9, 2]
    assert params.all_stop_token_ids == {9, 1, 2}


@pytest.mark.known_fault(kind="lost-stop-rule")
def test_ignore_eos_only_keeps_eos_for_min_tokens(tokenizer: Tokenizer) -> None:
    params = settle(tokenizer, stop_token_ids=[9], ignore_eos=True)
    assert params.eos_token_id is None
    assert params.stop_token_ids == [9]
    assert params.all_stop_token_ids == {9, 1, 2}


def test_an_eos_that_the_caller_lists_is_not_listed_twice(tokenizer: Tokenizer) -> None:
    assert settle(tokenizer, stop_token_ids=[2]).stop_token_ids == [2]


def test_without_a_tokenizer_the_callers_eos_counts() -> None:
    assert settle(None, eos_token_id=5).eos_token_id == 5
    assert settle(None, eos_token_id=5, ignore_eos=True).eos_token_id is None
    assert settle(None).stop_token_ids is None


def test_settled_options_stay_as_they_are(tokenizer: Tokenizer) -> None:
    params = settle(tokenizer, max_tokens=None, bad_words=["ab"], stop=["x"])
    assert settle_params(params, 40, tokenizer, LIMITS) == params


def test_the_callers_options_are_left_alone(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=None, stop_token_ids=[9], bad_words=["ab"])
    before = msgspec.json.encode(params)
    settle_params(params, 40, tokenizer, LIMITS)
    assert msgspec.json.encode(params) == before
    assert params.all_stop_token_ids == {9}


def test_bad_words_are_forbidden_at_the_start_and_after_a_space(smollm2: Tokenizer) -> None:
    limits = RequestLimits(100, None, 20)
    assert settle(smollm2, limits=limits, bad_words=[" the"]).bad_words_token_ids == [
        smollm2.encode("the"),
        smollm2.encode(" the"),
    ]


def test_a_bad_word_that_does_not_join_with_the_space_is_forbidden_once(
    smollm2: Tokenizer,
) -> None:
    limits = RequestLimits(100, None, 20)
    space, digit = smollm2.encode(" 7")
    assert [space] == smollm2.encode(" ")
    assert settle(smollm2, limits=limits, bad_words=["7"]).bad_words_token_ids == [[digit]]


@pytest.mark.known_fault(kind="token-out-of-range")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 21}, "logprobs must be at most 20, got 21"),
        ({"logprobs": -1}, "logprobs must be at most 20, got -1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most 20, got 21"),
        (
            {"logprob_token_ids": [1] * 129},
            "logprob_token_ids must be at most 128 ids, got 129",
        ),
        ({"logprob_token_ids": [1, 2], "logprobs": 1}, "logprobs must be None or 2, .* got 1"),
        ({"logprob_token_ids": [50]}, "logprob_token_ids must be token ids, 0 to 49, got 50"),
        ({"allowed_token_ids": []}, r"allowed_token_ids must not be empty, got \[\]"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids .* got -1 at place 1"),
        ({"logit_bias": {50: 1.0}}, "logit_bias must be token ids, 0 to 49, got 50 at place 0"),
        ({"bad_words": ["  "]}, "bad_words must be words, got '  '"),
        (
            {"stop": ["x"], "detokenize": False},
            r"stop must be empty because detokenize is False, got \['x'\]",
        ),
    ],
)
def test_options_that_cannot_be_served_are_named(
    tokenizer: Tokenizer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        settle(tokenizer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "x"}, "stop must be empty because there is no tokenizer, got 'x'"),
        ({"bad_words": ["x"]}, "bad_words must be empty because there is no tokenizer"),
    ],
)
def test_text_options_need_a_tokenizer(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        settle(None, **options)


def test_limits_can_be_lifted() -> None:
    limits = RequestLimits(max_model_len=100, vocab_size=None, max_logprobs=-1)
    assert settle(None, limits=limits, logprobs=-1, allowed_token_ids=[10**6]).logprobs == -1
    with pytest.raises(RequestError, match="0 or more, got -5"):
        settle(None, limits=limits, allowed_token_ids=[-5])


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object"}},
        {"json": "{}"},
        {"json_object": True},
        {"regex": "(not looked at"},
        {"choice": ["a"]},
        {"structural_tag": '{"structures": [], "triggers": []}'},
    ],
)
def test_structured_outputs_go_as_they_are(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    structured = StructuredOutputsParams(**fields)
    assert settle(tokenizer, structured_outputs=structured).structured_outputs == structured


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "structured_outputs.json must be JSON, got '{'"),
        ({"json": "[1]"}, "structured_outputs.json must be a JSON object, got '[1]'"),
        ({"json": "\ud800"}, "structured_outputs.json must be JSON"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag must be JSON, got 'x'"),
        ({"json": [1]}, "structured_outputs cannot be sent: Expected `str | object"),
        ({"json": {"a": object()}}, "structured_outputs cannot be sent: "),
        ({"json": nested(100_000)}, "structured_outputs cannot be sent: "),
        ({"choice": "abc"}, "structured_outputs cannot be sent: Expected `array"),
        ({"choice": [1]}, "structured_outputs cannot be sent: Expected `str`, got `int`"),
        ({"regex": 5}, "structured_outputs cannot be sent: Expected `str"),
    ],
)
def test_structured_outputs_that_no_engine_could_take_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        settle(None, structured_outputs=StructuredOutputsParams(**fields))
