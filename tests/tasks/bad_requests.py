"""Requests that an engine must refuse, field by field, and strange ones that it must serve."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec

from tests.tasks.bad_messages import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    BadMessage,
    Reaction,
    Table,
    add,
    params,
)
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams

REFUSED, SERVED, ANSWERED = Reaction.REFUSED, Reaction.SERVED, Reaction.ANSWERED
IGNORED, DROPPED, LATER = Reaction.IGNORED, Reaction.DROPPED, Reaction.REFUSED_LATER

MEGABYTE = "x" * (1 << 20)
NEARLY_FULL = [1] * (MAX_MODEL_LEN - 3)
"""A prompt that leaves room for three tokens, whatever is asked for."""
LARGEST = 2**64 - 1
"""What msgpack can spell."""
LARGEST_SIGNED, SMALLEST = 2**63 - 1, -(2**63)

REQUEST_FIELDS = msgspec.structs.fields(EngineCoreRequest)
PARAMS_FIELDS = msgspec.structs.fields(SamplingParams)


def embeds(
    reaction: Reaction, reason: str, dtype: str, shape: list[int], data: bytes, **fields: Any
) -> BadMessage:
    """A prompt of embeddings; a tiny model's are 64 wide."""
    fields = {"prompt_token_ids": None, "prompt_embeds": [dtype, shape, 1]} | fields
    return add(reaction, reason, data, **fields)


def grammar(reaction: Reaction, reason: str = "", **fields: Any) -> BadMessage:
    return params(reaction, reason, structured_outputs=fields)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def of_wrong_type(place: int, field: msgspec.structs.FieldInfo) -> BadMessage:
    # Without its id nobody can be told.
    reaction = DROPPED if field.name == "request_id" else REFUSED
    return add(reaction, f"$[{place}]", **{field.encode_name: b"x"})


WRONG_TYPES: Table = {
    f"{field.encode_name} of bytes": of_wrong_type(place, field)
    for place, field in enumerate(REQUEST_FIELDS)
} | {
    f"{field.encode_name} of bytes": params(
        REFUSED, f"$[3].{field.encode_name}", **{field.encode_name: b"x"}
    )
    for field in PARAMS_FIELDS
}
"""No field is of bytes."""

NOT_FINITE: Table = {
    f"{field.encode_name} {value}": params(REFUSED, field.name, **{field.encode_name: value})
    for field in PARAMS_FIELDS
    for value in (math.nan, math.inf, -math.inf)
    if field.type is float
} | {
    f"arrival_time {value}": add(REFUSED, "arrival_time", arrival_time=value)
    for value in (math.nan, math.inf, -math.inf)
}

BAD_REQUEST_FIELDS: Table = {
    "no prompt": add(REFUSED, "prompt_token_ids is empty", prompt_token_ids=None),
    "an empty prompt": add(REFUSED, "prompt_token_ids is empty", prompt_token_ids=[]),
    "a prompt without room for output": add(
        REFUSED, "max_model_len is 256", prompt_token_ids=[1] * MAX_MODEL_LEN
    ),
    "a prompt of a million tokens": add(REFUSED, "max_model_len", prompt_token_ids=[1] * 10**6),
    "a token id at the vocabulary's end": add(REFUSED, "257", prompt_token_ids=[1, VOCAB_SIZE]),
    "a token id of -1": add(REFUSED, "-1", prompt_token_ids=[-1]),
    "a token id of 2**31": add(REFUSED, str(2**31), prompt_token_ids=[2**31]),
    "a token id of 2**64 - 1": add(REFUSED, str(LARGEST), prompt_token_ids=[LARGEST]),
    "a token id of -2**63": add(REFUSED, str(SMALLEST), prompt_token_ids=[SMALLEST]),
    "a token id of 1.0": add(REFUSED, "$[1]", prompt_token_ids=[1.0]),
    "a token id of text": add(REFUSED, "$[1]", prompt_token_ids=["1"]),
    "a token id of nil": add(REFUSED, "$[1]", prompt_token_ids=[None]),
    "a token id in a list": add(REFUSED, "$[1]", prompt_token_ids=[[1]]),
    "an image": add(REFUSED, "mm_features", mm_features=[{"modality": "image"}]),
    "no sampling_params": add(REFUSED, "sampling_params", sampling_params=None),
    "sampling_params in a list": add(REFUSED, "$[3]", sampling_params=[]),
    "sampling_params by number": add(REFUSED, "$[3]", sampling_params={1: 1}),
    "a pooling request": add(REFUSED, "pooling_params", pooling_params=[]),
    "a pooling request that breaks elsewhere": add(
        REFUSED, "$[1]", pooling_params=[], prompt_token_ids=[None]
    ),
    "an adapter where none are served": add(REFUSED, "lora_request", lora_request=["a", 1, "/"]),
    "a grammar after reasoning": add(
        REFUSED,
        "structured_outputs",
        sampling_params={"structured_outputs": {"regex": "a"}},
        reasoning_ended=False,
    ),
    "an adapter without id": add(REFUSED, "$[6]", lora_request=["a"]),
    "embeddings of no floats": embeds(REFUSED, "prompt_embeds", "int8", [1, 64], bytes(64)),
    "embeddings of no tokens": embeds(REFUSED, "prompt_embeds", "float32", [0, 64], b""),
    "embeddings of another width": embeds(REFUSED, "prompt_embeds", "float32", [1, 63], bytes(252)),
    "embeddings of one dimension": embeds(REFUSED, "prompt_embeds", "float32", [64], bytes(256)),
    "embeddings beside other ids": embeds(
        REFUSED, "prompt_embeds", "float32", [1, 64], bytes(256), prompt_token_ids=[5, 6]
    ),
    "places without embeddings": add(
        REFUSED, "prompt_is_token_ids", prompt_is_token_ids=[True, True]
    ),
    "trace headers of numbers": add(REFUSED, "$[14]", trace_headers={"a": 1}),
    "a session": add(REFUSED, "resumable", resumable=True),
}

BAD_PARAMS: Table = {
    "temperature -1": params(REFUSED, "temperature", temperature=-1.0),
    "temperature 3": params(REFUSED, "temperature", temperature=3.0),
    "temperature of text": params(REFUSED, "temperature", temperature="a"),
    "top_p 0": params(REFUSED, "top_p", top_p=0.0),
    "top_p 1.1": params(REFUSED, "top_p", top_p=1.1),
    "top_k -2": params(REFUSED, "top_k", top_k=-2),
    "top_k 1.5": params(REFUSED, "top_k", top_k=1.5),
    "min_p -0.1": params(REFUSED, "min_p", min_p=-0.1),
    "min_p 1.1": params(REFUSED, "min_p", min_p=1.1),
    "presence_penalty 100": params(REFUSED, "presence_penalty", presence_penalty=100.0),
    "frequency_penalty -2.1": params(REFUSED, "frequency_penalty", frequency_penalty=-2.1),
    "repetition_penalty 0": params(REFUSED, "repetition_penalty", repetition_penalty=0.0),
    "repetition_penalty -1": params(REFUSED, "repetition_penalty", repetition_penalty=-1.0),
    "n 0": params(REFUSED, "n must", n=0),
    "n -1": params(REFUSED, "n must", n=-1),
    "n 2 without a draw": params(REFUSED, "n must", n=2, temperature=0.0),
    "seed 2**63": params(REFUSED, "seed", seed=2**63),
    "seed 2**64 - 1": params(REFUSED, "seed", seed=LARGEST),
    "seed of text": params(REFUSED, "seed", seed="7"),
    "seed 7.0": params(REFUSED, "seed", seed=7.0),
    "max_tokens 0": params(REFUSED, "max_tokens", max_tokens=0),
    "max_tokens -1": params(REFUSED, "max_tokens", max_tokens=-1),
    "max_tokens of text": params(REFUSED, "max_tokens", max_tokens="5"),
    "max_tokens 1.5": params(REFUSED, "max_tokens", max_tokens=1.5),
    "max_tokens true": params(REFUSED, "max_tokens", max_tokens=True),
    "min_tokens -1": params(REFUSED, "min_tokens", min_tokens=-1),
    "min_tokens above max_tokens": params(REFUSED, "min_tokens", min_tokens=5, max_tokens=4),
    "logprobs -2": params(REFUSED, "logprobs", logprobs=-2),
    "logprobs above the vocabulary": params(REFUSED, "logprobs", logprobs=VOCAB_SIZE + 1),
    "logprobs 2**64 - 1": params(REFUSED, "logprobs", logprobs=LARGEST),
    "prompt_logprobs -2": params(REFUSED, "prompt_logprobs", prompt_logprobs=-2),
    "prompt_logprobs 2**63 - 1": params(REFUSED, "prompt_logprobs", prompt_logprobs=LARGEST_SIGNED),
    "logprobs of a token outside": params(
        REFUSED, "logprob_token_ids", logprob_token_ids=[VOCAB_SIZE]
    ),
    "logprobs of token -1": params(REFUSED, "logprob_token_ids", logprob_token_ids=[-1]),
    "stop of an empty string": params(REFUSED, "stop", stop=["a", ""]),
    "stop of numbers": params(REFUSED, "stop", stop=[1]),
    "stop of 1,000 strings and an empty one": params(REFUSED, "stop", stop=[*["abc"] * 1000, ""]),
    "a stop id outside the vocabulary": params(
        REFUSED, "stop_token_ids holds 257", stop_token_ids=[VOCAB_SIZE], min_tokens=1
    ),
    "a stop id of -1": params(
        REFUSED, "stop_token_ids holds -1", stop_token_ids=[-1], min_tokens=1
    ),
    "a stop id of 2**64 - 1": params(REFUSED, "stop_token_ids", stop_token_ids=[LARGEST]),
    "an end token outside": params(REFUSED, "_eos_token_id holds 257", _eos_token_id=VOCAB_SIZE),
    "an end token of -1": params(REFUSED, "_eos_token_id holds -1", _eos_token_id=-1),
    "a masked token outside": params(
        REFUSED, "stop_token_ids holds 257", _all_stop_token_ids=[1, VOCAB_SIZE]
    ),
    "output_kind 9": params(REFUSED, "output_kind", output_kind=9),
    "logit_bias of a token outside": params(REFUSED, "logit_bias", logit_bias={VOCAB_SIZE: 5.0}),
    "logit_bias of token -1": params(REFUSED, "logit_bias", logit_bias={-1: 5.0}),
    "logit_bias by text": params(REFUSED, "logit_bias", logit_bias={"1": 5.0}),
    "logit_bias NaN": params(REFUSED, "logit_bias", logit_bias={1: math.nan}),
    "logit_bias infinity": params(REFUSED, "logit_bias", logit_bias={1: math.inf}),
    "only tokens outside allowed": params(
        REFUSED, "allowed_token_ids", allowed_token_ids=[VOCAB_SIZE]
    ),
    "only token -1 allowed": params(REFUSED, "allowed_token_ids", allowed_token_ids=[-1]),
    "no token allowed": params(REFUSED, "allowed_token_ids", allowed_token_ids=[]),
    "bad_words of an empty string": params(REFUSED, "bad_words", bad_words=["a", ""]),
    "a bad word outside the vocabulary": params(
        REFUSED, "bad_words", bad_words=["a"], _bad_words_token_ids=[[1, VOCAB_SIZE]]
    ),
    "a bad word of token -1": params(
        REFUSED, "bad_words", bad_words=["a"], _bad_words_token_ids=[[-1]]
    ),
    "a grammar of nothing": grammar(REFUSED, "structured_outputs"),
    "two grammars": grammar(REFUSED, "structured_outputs", regex="a", json="{}"),
    "a grammar by number": grammar(REFUSED, "structured_outputs", regex=1),
    "a choice of nothing": grammar(REFUSED, "structured_outputs", choice=[]),
    "a budget of thoughts": params(REFUSED, "thinking_token_budget", thinking_token_budget=-5),
    "repetition_detection of floats": params(
        REFUSED, "repetition_detection", repetition_detection={"min_count": 1.5}
    ),
    "extra_args of a pickle": params(
        REFUSED, "pickle", extra_args={"a": msgspec.msgpack.Ext(1, b"x")}
    ),
}

BAD_GRAMMARS: Table = {
    "a regex that is none": grammar(LATER, "regex", regex="("),
    "a long regex that is none": grammar(LATER, "regex", regex="a" * 100_000 + "("),
    "a regex with line feeds that is none": grammar(LATER, "regex", regex="\n(\n" * 9),
    "a regex of a megabyte": grammar(LATER, "regex", regex=MEGABYTE),
    "a schema that is no JSON": grammar(LATER, "json", json="{"),
    "a schema of no type": grammar(LATER, "json", json={"type": "nope"}),
    "a schema nested without end": grammar(LATER, "json", json="[" * 5000),
    "a schema that refers to itself alone": grammar(LATER, "json", json={"$ref": "#"}),
    "a schema elsewhere": grammar(LATER, "json", json={"$ref": "http://localhost/schema"}),
    "a grammar that is none": grammar(LATER, "grammar", grammar="x"),
    "a choice of an empty string": grammar(LATER, "choice", choice=[""]),
    "a choice of 100,000 strings": grammar(LATER, "choice", choice=["a"] * 100_000),
    "a tag that is no JSON": grammar(LATER, "structural_tag", structural_tag="x"),
    "a tag of nothing": grammar(LATER, "structural_tag", structural_tag="{}"),
    "a regex with a wide count": grammar(ANSWERED, regex="(a{1000}){1000}"),
    "a regex with counts in counts": grammar(ANSWERED, regex="((((a{99}){99}){99}){99}){99}"),
    "a regex for what no byte can spell": grammar(ANSWERED, regex="[^\\x00-\U0010ffff]"),
    "a grammar without an end": grammar(ANSWERED, grammar='root ::= "a" root'),
    "a schema for anything": grammar(ANSWERED, json={}),
    "a backend that is none": grammar(ANSWERED, json_object=True, _backend="nope"),
}

STRANGE_REQUESTS: Table = {
    "a request to be aborted at once": add(IGNORED, abort_immediately=True),
    "an id of a megabyte": add(SERVED, request_id=MEGABYTE),
    "an empty id": add(SERVED, request_id=""),
    "an id with a line feed and an escape": add(SERVED, request_id="a\n\x1b[2Jb\u202e\0"),
    "an id of a megabyte that is refused": add(
        REFUSED, "empty", request_id=MEGABYTE, prompt_token_ids=[]
    ),
    "more fields than there are": add(SERVED, later_field=1, last_field=[None]),
    "a user's id of a megabyte": add(SERVED, external_req_id=MEGABYTE),
    "trace headers of a megabyte": add(SERVED, trace_headers={"traceparent": MEGABYTE}),
    "a salt of a megabyte": add(SERVED, cache_salt=MEGABYTE),
    "a rank that is not here": add(SERVED, data_parallel_rank=99),
    "a wave far ahead": add(SERVED, current_wave=LARGEST),
    "a wave far behind": add(SERVED, current_wave=SMALLEST),
    "the last priority": add(SERVED, priority=LARGEST),
    "the first priority": add(SERVED, priority=SMALLEST),
    "an arrival at the end of time": add(SERVED, arrival_time=1.7e308),
    "an arrival before time": add(SERVED, arrival_time=SMALLEST),
    "parser options that are nested": add(SERVED, reasoning_parser_kwargs=nested(100)),
    "reasoning that has ended": add(SERVED, reasoning_ended=True),
    "parameters nobody knows": params(SERVED, later="x", nested=nested(100)),
    "extra_args that are nested": params(SERVED, extra_args=nested(100)),
    "1,000 stop strings": params(SERVED, stop=[f"stop {i}" for i in range(1000)]),
    "a stop string of a megabyte": params(SERVED, stop=MEGABYTE),
    "n 2**64 - 1": params(SERVED, n=LARGEST, temperature=1.0),
    "top_k 2**64 - 1": params(SERVED, top_k=LARGEST, temperature=1.0),
    "top_p next to 0": params(SERVED, top_p=5e-324, temperature=1.0),
    "min_p 1": params(SERVED, min_p=1.0, temperature=1.0),
    "temperature next to 0": params(SERVED, temperature=5e-324),
    "seed 2**63 - 1": params(SERVED, seed=LARGEST_SIGNED, temperature=2.0),
    "seed -2**63": params(SERVED, seed=SMALLEST, temperature=2.0),
    "max_tokens 2**64 - 1": add(
        SERVED, prompt_token_ids=NEARLY_FULL, sampling_params={"max_tokens": LARGEST}
    ),
    "max_tokens nil": add(
        SERVED, prompt_token_ids=NEARLY_FULL, sampling_params={"max_tokens": None}
    ),
    "min_tokens 2**64 - 1": add(
        SERVED,
        prompt_token_ids=NEARLY_FULL,
        sampling_params={"max_tokens": None, "min_tokens": LARGEST, "stop_token_ids": [5]},
    ),
    "every token masked until min_tokens": params(
        SERVED, stop_token_ids=list(range(VOCAB_SIZE)), min_tokens=4
    ),
    "repetition_detection without limits": params(
        SERVED,
        repetition_detection={
            "max_pattern_size": LARGEST,
            "min_pattern_size": SMALLEST,
            "min_count": LARGEST,
        },
    ),
    "routed_experts_prompt_start -2**63": params(SERVED, routed_experts_prompt_start=SMALLEST),
    "output_text_buffer_length 2**64 - 1": params(SERVED, output_text_buffer_length=LARGEST),
    "embeddings of NaN": embeds(
        ANSWERED, "", "float32", [3, 64], struct.pack("<f", math.nan) * 192
    ),
    "embeddings of infinity": embeds(
        ANSWERED, "", "float32", [3, 64], struct.pack("<f", -math.inf) * 192
    ),
    "embeddings as large as they can be": embeds(
        ANSWERED, "", "float32", [3, 64], struct.pack("<f", 3.4e38) * 192
    ),
    # Allowed values that float32 cannot hold: whoever serves them must still give a token.
    "repetition_penalty next to 0": params(ANSWERED, repetition_penalty=5e-324),
    "repetition_penalty 1e308": params(ANSWERED, repetition_penalty=1e308),
    "logit_bias 1e308": params(ANSWERED, logit_bias={1: 1e308, 2: -1e308}),
    "all tokens allowed, again and again": params(
        ANSWERED, allowed_token_ids=list(range(VOCAB_SIZE)) * 10
    ),
    "every token a bad word": params(
        ANSWERED,
        bad_words=["a"],
        _bad_words_token_ids=[[token_id] for token_id in range(VOCAB_SIZE)],
    ),
    "a bad word without tokens": params(ANSWERED, bad_words=["a"], _bad_words_token_ids=[[]]),
}

BAD_REQUESTS: Table = {
    **WRONG_TYPES,
    **NOT_FINITE,
    **BAD_REQUEST_FIELDS,
    **BAD_PARAMS,
    **BAD_GRAMMARS,
}
