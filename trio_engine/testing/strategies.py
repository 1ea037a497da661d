"""Hypothesis strategies for what an engine is sent: options, requests, frames good and bad.

Public kit; needs hypothesis, but neither torch nor zmq nor pytest. Everything shrinks towards one
short prompt with default options: the prompt is drawn first, and an option that does not matter
disappears.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from trio_engine.requests import EngineCoreRequest, PauseMode
from trio_engine.sampling_params import (
    SEED_LIMITS,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from trio_engine.testing.requests import make_request
from trio_engine.wire.codec import RequestEncoder
from trio_engine.wire.messages import AbortRequest, EngineCoreRequestType, UtilityCall

VOCAB_SIZE = 40
"""Ids to draw from unless told otherwise; so few that stop rules and repetitions hit."""

REQUEST_IDS = ("a", "b", "c")
"""So few that ids are used again and again."""


def prompts(vocab_size: int = VOCAB_SIZE, *, max_size: int = 8) -> st.SearchStrategy[list[int]]:
    """Token ids of a prompt, which is never empty."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_size)


def served_options(
    vocab_size: int = VOCAB_SIZE, *, max_tokens: int = 20
) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of ``SamplingParams`` that this engine serves.

    A dictionary and not the object, because it prints as what one would write.
    """
    token_ids = st.integers(0, vocab_size - 1)
    options = st.fixed_dictionaries(
        {"max_tokens": st.integers(1, max_tokens)},
        optional={
            "stop_token_ids": st.lists(token_ids, min_size=1, max_size=8),
            "eos_token_id": token_ids,
            "min_tokens": st.integers(1, 4),
            "logprobs": st.integers(0, 3),
            "prompt_logprobs": st.integers(0, 2),
            "repetition_detection": st.builds(
                RepetitionDetectionParams,
                max_pattern_size=st.integers(1, 3),
                min_count=st.integers(2, 3),
            ),
        },
    )
    return options.map(_with_lower_min_tokens)


def request_options(
    vocab_size: int = VOCAB_SIZE, *, max_tokens: int = 20
) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of ``testing.requests.make_request``: ``served_options`` and more."""
    more = st.fixed_dictionaries(
        {}, optional={"priority": st.integers(-1, 1), "cache_salt": st.just("salt")}
    )
    return st.tuples(served_options(vocab_size, max_tokens=max_tokens), more).map(
        lambda pair: pair[0] | pair[1]
    )


def sampling_params(vocab_size: int = VOCAB_SIZE) -> st.SearchStrategy[SamplingParams]:
    """Any that can be made, also with what this engine does not serve."""
    token_ids = st.integers(0, vocab_size - 1)
    more = st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0.0, 2.0),
            "top_p": st.floats(0.0, 1.0, exclude_min=True),
            "top_k": st.integers(-1, vocab_size),
            "min_p": st.floats(0.0, 1.0),
            "seed": st.integers(*SEED_LIMITS),
            "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=2),
            "ignore_eos": st.booleans(),
            "presence_penalty": st.floats(-2.0, 2.0),
            "frequency_penalty": st.floats(-2.0, 2.0),
            "repetition_penalty": st.floats(0.0, 10.0, exclude_min=True),
            "logprobs": st.integers(-1, vocab_size),
            "prompt_logprobs": st.integers(-1, vocab_size),
            "logit_bias": st.dictionaries(token_ids, st.floats(-100.0, 100.0), max_size=2),
            "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=2),
            "output_kind": st.sampled_from(RequestOutputKind),
            "extra_args": st.dictionaries(st.text(), st.integers(-9, 9) | st.text(), max_size=2),
        },
    )
    return st.tuples(served_options(vocab_size), more).map(
        lambda pair: SamplingParams(**(pair[0] | pair[1]))
    )


@st.composite
def requests(
    draw: st.DrawFn, vocab_size: int = VOCAB_SIZE, *, num_clients: int = 2, max_prompt: int = 8
) -> EngineCoreRequest:
    """Any that decodes, also ones that are refused at admission."""
    prompt = draw(prompts(vocab_size, max_size=max_prompt))
    request = make_request(draw(st.sampled_from(REQUEST_IDS)), prompt)
    request.client_index = draw(st.integers(0, num_clients - 1))
    request.sampling_params = draw(sampling_params(vocab_size))
    request.arrival_time = 0.0
    request.priority = draw(st.integers(-2, 2))
    request.cache_salt = draw(st.none() | st.text())
    request.trace_headers = draw(st.none() | st.just({"traceparent": "00-1-2-01"}))
    request.abort_immediately = draw(st.booleans())
    return request


def utility_calls(*, num_clients: int = 2) -> st.SearchStrategy[UtilityCall]:
    """Calls of methods that there are and are not, with arguments that fit and do not."""
    arguments = st.none() | st.booleans() | st.sampled_from([mode.value for mode in PauseMode])
    methods = [
        "is_scheduler_paused",
        "reset_prefix_cache",
        "pause_scheduler",
        "__init__",
        "nothing",
    ]
    return st.builds(
        UtilityCall,
        st.integers(0, num_clients - 1),
        st.integers(0, 2**64 - 1),
        st.sampled_from(methods),
        st.lists(arguments, max_size=3),
    )


def frames(*, num_clients: int = 2) -> st.SearchStrategy[list[bytes]]:
    """What an engine can decode: ADD, ABORT or UTILITY, as multipart frames."""
    aborts = st.lists(st.sampled_from(REQUEST_IDS), max_size=3).map(AbortRequest)
    messages = requests(num_clients=num_clients) | aborts | utility_calls(num_clients=num_clients)
    return messages.map(lambda message: [bytes(f) for f in RequestEncoder().encode(message)])


def malformed_frames(*, num_clients: int = 2) -> st.SearchStrategy[list[bytes]]:
    """What no engine can decode, as multipart frames; none is a message by chance."""
    return st.one_of(
        st.sampled_from(_NO_KIND),
        st.sampled_from([[kind.value] for kind in EngineCoreRequestType]),
        st.sampled_from(_WRONG_BODIES).map(lambda kind_and_body: _pack(*kind_and_body)),
        st.tuples(frames(num_clients=num_clients), st.integers(0)).map(_cut),
        frames(num_clients=num_clients).map(lambda sent: [sent[0], sent[1] + b"\xc0", *sent[2:]]),
    )


_NO_KIND: list[list[bytes]] = [[], [b""], [b"\x07", b"\x90"], [b"\x00\x00", b"\x90"], [b"READY"]]

# Bodies that are msgpack, but not of the type that the kind wants.
_WRONG_BODIES: list[tuple[EngineCoreRequestType, Any]] = [
    (EngineCoreRequestType.ABORT, None),
    (EngineCoreRequestType.ABORT, [["a"]]),
    (EngineCoreRequestType.ABORT, [1]),
    (EngineCoreRequestType.ADD, []),
    (EngineCoreRequestType.ADD, ["a"]),
    *((EngineCoreRequestType.ADD, [id_, [1], *[None] * 7]) for id_ in (1.5, None, b"a", 7)),
    # Embeddings in a frame that is not there.
    (EngineCoreRequestType.ADD, ["a", *[None] * 4, 0.0, *[None] * 3, ["float32", [1, 2], 1]]),
    (EngineCoreRequestType.UTILITY, [0, 1, "nothing"]),
    (EngineCoreRequestType.UTILITY, [0, 1, "nothing", [], None]),
    (EngineCoreRequestType.UTILITY, [0, -1, "nothing", []]),
    (EngineCoreRequestType.START_DP_WAVE, []),
]


def _pack(kind: EngineCoreRequestType, body: Any) -> list[bytes]:
    return [kind.value, msgspec.msgpack.encode(body)]


def _cut(drawn: tuple[list[bytes], int]) -> list[bytes]:
    """A body without its end: a beginning of msgpack is never msgpack."""
    (kind, body, *_), length = drawn
    return [kind, body[: length % len(body)]]


def _with_lower_min_tokens(options: dict[str, Any]) -> dict[str, Any]:
    if "min_tokens" not in options:
        return options
    return options | {"min_tokens": min(options["min_tokens"], options["max_tokens"])}
