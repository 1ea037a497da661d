"""Messages that no front end should send, and what an engine must make of each.

Public kit, pure. ``check_engine`` sends every row of ``WIRE_FAULTS`` beside a healthy stream. All
of them can be judged from outside, whatever the engine runs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from trio_engine.wire.messages import EngineCoreRequestType, Frames


class Fate(enum.Enum):
    """What must become of a message, beside that it harms nobody."""

    DROPPED = "nobody hears of it"
    REFUSED = "an ERROR output for its request"
    FAILED = "a failure of its call"


class FaultContext(NamedTuple):
    """What a faulty message refers to.

    Attributes:
        bad_id: of the request that is wrong.
        live_id: of the sender's stream that runs beside it.
        call_id: of the call that is wrong.
        max_model_len: that the engine announced.
    """

    bad_id: str
    live_id: str
    call_id: int
    max_model_len: int


class WireFault(NamedTuple):
    """One row: a name, the fate that it deserves, and its frames, for client 0."""

    name: str
    fate: Fate
    frames: Callable[[FaultContext], Frames]


pack = msgspec.msgpack.encode
ADD, ABORT, WAVE, UTILITY = (kind.value for kind in EngineCoreRequestType)

PICKLE = msgspec.msgpack.Ext(1, b"cbuiltins\nprint\n.")
NESTED = b"\x91" * 100_000
"""An array in an array in an array: deeper than decoders go."""
TENSOR_IN_FRAME_1 = ["float32", [4, 4], 1]
BEYOND_ANY_VOCABULARY = 2**31 - 1


def body_of(context: FaultContext, **changes: Any) -> list[Any]:
    """The fields of a good request of ``bad_id``, some of them changed."""
    fields: dict[str, Any] = {
        "request_id": context.bad_id,
        "prompt_token_ids": [5, 6],
        "mm_features": None,
        "sampling_params": {"temperature": 0.0, "max_tokens": 4},
        "pooling_params": None,
        "arrival_time": 0.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "client_index": 0,
    }
    return list((fields | changes).values())


def _raw(name: str, *frames: bytes) -> WireFault:
    return WireFault(name, Fate.DROPPED, lambda _: list(frames))


def _add(name: str, fate: Fate = Fate.REFUSED, *aux: bytes, **changes: Any) -> WireFault:
    return WireFault(name, fate, lambda context: [ADD, pack(body_of(context, **changes)), *aux])


def _params(name: str, **changes: Any) -> WireFault:
    good = {"temperature": 0.0, "max_tokens": 4}
    return _add(name, sampling_params=good | changes)


def _prompt(name: str, make: Callable[[FaultContext], Any]) -> WireFault:
    return WireFault(
        name,
        Fate.REFUSED,
        lambda context: [ADD, pack(body_of(context, prompt_token_ids=make(context)))],
    )


def _call(name: str, *rest: Any) -> WireFault:
    return WireFault(
        name, Fate.FAILED, lambda context: [UTILITY, pack([0, context.call_id, *rest])]
    )


NO_MESSAGES = (
    _raw("one empty frame", b""),
    _raw("an unknown type", b"\x07", pack([])),
    _raw("a type of two bytes", b"\x00\x00", pack(["x"])),
    _raw("READY from no coordinator", b"READY"),
    _raw("START_DP_WAVE of rubbish", WAVE, pack("x")),
)

BAD_ADDS = (
    _raw("ADD without a body", ADD),
    _raw("ADD with an empty body", ADD, b""),
    _raw("ADD that is a map", ADD, pack({"request_id": "x"})),
    _raw("ADD that is a pickle", ADD, pack(PICKLE)),
    _raw("ADD nested without end", ADD, NESTED),
    WireFault("ADD cut off", Fate.REFUSED, lambda c: [ADD, pack(body_of(c))[:-9]]),
    WireFault("ADD and more", Fate.REFUSED, lambda c: [ADD, pack(body_of(c)) + b"\x00"]),
    _add("ADD whose id is a float", Fate.DROPPED, request_id=1.5),
    _add("ADD whose id is nil", Fate.DROPPED, request_id=None),
    _add("ADD for a client that does not exist", Fate.DROPPED, client_index=9),
    WireFault(
        "ADD under an id that is live",
        Fate.DROPPED,
        lambda c: [ADD, pack(body_of(c, request_id=c.live_id))],
    ),
    _add("ADD with a tensor whose frame is absent", prompt_embeds=TENSOR_IN_FRAME_1),
    _add(
        "ADD with a tensor whose frame is short",
        Fate.REFUSED,
        b"x",
        prompt_embeds=TENSOR_IN_FRAME_1,
    ),
)

BAD_REQUESTS = (
    _prompt("a prompt of nil", lambda _: None),
    _prompt("an empty prompt", lambda _: []),
    _prompt("a prompt as long as max_model_len", lambda c: [5] * c.max_model_len),
    _prompt("a prompt that is far too long", lambda c: [5] * (3 * c.max_model_len)),
    _prompt("a prompt with an id beyond any vocabulary", lambda _: [5, BEYOND_ANY_VOCABULARY]),
    _prompt("a prompt with a negative id", lambda _: [5, -1]),
    _add("no sampling parameters", sampling_params=None),
    _params("a temperature of NaN", temperature=float("nan")),
    _params("a temperature of 9", temperature=9.0),
    _params("top_p of 0", temperature=1.0, top_p=0.0),
    _params("max_tokens of 0", max_tokens=0),
    _params("min_tokens above max_tokens", min_tokens=5),
    _params("a seed beyond 64 bits, as text", temperature=1.0, seed="18446744073709551616"),
    _params("a stop token beyond any vocabulary", stop_token_ids=[BEYOND_ANY_VOCABULARY]),
    _params("a negative stop token", stop_token_ids=[-1], min_tokens=1),
    _params("a bias for an id beyond any vocabulary", logit_bias={BEYOND_ANY_VOCABULARY: 1.0}),
)

BAD_ABORTS = (
    _raw("ABORT of nil", ABORT, pack(None)),
    _raw("ABORT of a number", ABORT, pack(1)),
    _raw("ABORT without a body", ABORT),
    WireFault("ABORT of a list in a list", Fate.DROPPED, lambda c: [ABORT, pack([[c.live_id]])]),
    _raw("ABORT of nobody known", ABORT, pack(["nobody", "no one"])),
)

BAD_CALLS = (
    _raw("UTILITY without a body", UTILITY),
    _call("UTILITY with three fields", "is_sleeping"),
    _call("UTILITY with five fields", "is_sleeping", [], 1),
    _call("UTILITY whose arguments are a map", "is_sleeping", {}),
    _call("UTILITY of a private name", "__init__", []),
    _call("UTILITY of what is no method", "scheduler", []),
    _call("UTILITY with too many arguments", "is_sleeping", [1, 2, 3]),
    _raw("UTILITY for a client that does not exist", UTILITY, pack([9, 1, "is_sleeping", []])),
    _raw("UTILITY nested without end", UTILITY, NESTED),
)

WIRE_FAULTS: tuple[WireFault, ...] = (
    *NO_MESSAGES,
    *BAD_ADDS,
    *BAD_REQUESTS,
    *BAD_ABORTS,
    *BAD_CALLS,
)
