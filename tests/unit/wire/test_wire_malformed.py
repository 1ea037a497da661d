"""No bytes whatever make a decoder raise anything but ``ProtocolError``, or do much work."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings, strategies as st

from trio_engine.errors import ProtocolError
from trio_engine.wire.codec import (
    OutputsDecoder,
    RequestDecoder,
    UndecodableRequest,
    decode_control,
)
from trio_engine.wire.messages import (
    CoordinatorUpdate,
    EngineCoreRequestType,
    FirstRequestNotice,
    Init,
    ReadyResponse,
    StatusMessage,
)

ADD, ABORT, WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
RECORDED = json.loads((Path(__file__).parents[2] / "data" / "vllm-0.25.1.json").read_text())


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def ext(data: bytes, code: int = 3) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, data)


def add(**changes: Any) -> bytes:
    """Body of an ADD from client 7, changed at some places."""
    fields: dict[str, Any] = {
        "request_id": "r1",
        "prompt_token_ids": [1, 2],
        "mm_features": None,
        "sampling_params": {},
        "pooling_params": None,
        "arrival_time": 1.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "client_index": 7,
    }
    return packed(list((fields | changes).values()))


def embeds(*spelled: Any) -> bytes:
    return add(prompt_embeds=list(spelled))


def refused(frames: list[bytes]) -> UndecodableRequest:
    with pytest.raises(UndecodableRequest) as caught:
        RequestDecoder().decode(frames)
    return caught.value


DEEP = b"\x91" * 5000 + b"\xc0"
# The first fields of an ADD, cut off in the ways that hide the rest from any decoder.
NOT_UTF8 = add().replace(b"\xa2r1", b"\xa2r1", 1)[:4] + b"\xa1\xff"
NAN, INFINITY = float("nan"), float("inf")

BAD_ADDS = {
    "truncated": add()[:-1],
    "trailing bytes": add() + b"\xc0",
    "too short": packed(["r1", [1]]),
    "a part is not UTF-8": NOT_UTF8,
    "too deep": add(mm_features="@").replace(b"\xa1@", DEEP),
    "tokens are not integers": add(prompt_token_ids=[1.0]),
    "tokens are strings": add(prompt_token_ids=["1"]),
    "params are an array": add(sampling_params=[]),
    "NaN temperature": add(sampling_params={"temperature": NAN}),
    "negative temperature": add(sampling_params={"temperature": -1.0}),
    "hot temperature": add(sampling_params={"temperature": 3.0}),
    "temperature is text": add(sampling_params={"temperature": "a"}),
    "infinite temperature": add(sampling_params={"temperature": INFINITY}),
    "top_p 0": add(sampling_params={"top_p": 0.0}),
    "NaN top_p": add(sampling_params={"top_p": NAN}),
    "top_p 1.1": add(sampling_params={"top_p": 1.1}),
    "top_k -2": add(sampling_params={"top_k": -2}),
    "NaN min_p": add(sampling_params={"min_p": NAN}),
    "NaN penalty": add(sampling_params={"presence_penalty": NAN}),
    "penalty 100": add(sampling_params={"frequency_penalty": 100.0}),
    "repetition penalty 0": add(sampling_params={"repetition_penalty": 0.0}),
    "n 0": add(sampling_params={"n": 0}),
    "max_tokens 0": add(sampling_params={"max_tokens": 0}),
    "max_tokens is text": add(sampling_params={"max_tokens": "5"}),
    "max_tokens 1.5": add(sampling_params={"max_tokens": 1.5}),
    "max_tokens is a bool": add(sampling_params={"max_tokens": True}),
    "seed beyond 64 bits": add(sampling_params={"seed": 2**64 - 1}),
    "min_tokens above max_tokens": add(sampling_params={"min_tokens": 17}),
    "logprobs -2": add(sampling_params={"logprobs": -2}),
    "empty stop string": add(sampling_params={"stop": [""]}),
    "unknown output_kind": add(sampling_params={"output_kind": 9}),
    "pickle": add(sampling_params={"extra_args": {"a": ext(pickle.dumps(print), 1)}}),
    "cloudpickle": add(sampling_params={"extra_args": {"a": ext(b"", 2)}}),
    "unknown extension": add(sampling_params={"extra_args": {"a": ext(b"", 77)}}),
    "LoRA without id": add(lora_request=["name"]),
    "embeds are a map": add(prompt_embeds={}),
    "embeds of two parts": embeds("float32", [1]),
    "embeds of four parts": embeds("float32", [1], 1, 1),
    "dtype is a number": embeds(4, [1], ext(bytes(4))),
    "unknown dtype": embeds("float8", [1], ext(b"1")),
    "numpy dtype of a tensor": embeds("<f4", [1], ext(bytes(4))),
    "shape is a number": embeds("float32", 1, ext(bytes(4))),
    "negative size": embeds("float32", [-1], ext(bytes(4))),
    "two negative sizes": embeds("float32", [-1, -1], ext(bytes(4))),
    "size is a float": embeds("float32", [1.0], ext(bytes(4))),
    "size is a bool": embeds("float32", [True], ext(bytes(4))),
    "size overflows": embeds("float32", [2**63, 2**63], ext(bytes(4))),
    "size overflows beside a 0": embeds("float32", [0, 2**62, 2**62], ext(b"")),
    "40 dimensions": embeds("float32", [1] * 40, ext(bytes(4))),
    "data too short": embeds("float32", [2], ext(bytes(4))),
    "data too long": embeds("float32", [2], ext(bytes(12))),
    "data is bin": embeds("float32", [1], bytes(4)),
    "data is nil": embeds("float32", [1], None),
    "data is a bool": embeds("float32", [1], True),
    "data is pickle": embeds("float32", [1], ext(bytes(4), 1)),
    "data in shared memory": embeds("float32", [1], {"sender_id": "x", "tensor_id": 0}),
    "frame 0": embeds("float32", [1], 0),
    "frame -1": embeds("float32", [1], -1),
    "absent frame": embeds("float32", [1], 2),
    "frame of another length": embeds("float32", [3], 1),
}


@pytest.mark.parametrize("body", BAD_ADDS.values(), ids=BAD_ADDS)
def test_bad_add_names_its_request(body: bytes) -> None:
    error = refused([ADD, body, bytes(8)])
    assert (error.kind, error.request_id) == (EngineCoreRequestType.ADD, "r1")
    assert not error.is_pooling


def test_bad_add_names_its_client_and_its_task() -> None:
    error = refused([ADD, add(pooling_params=[None], prompt_token_ids=[None])])
    assert (error.client_index, error.is_pooling) == (7, True)


def test_message_says_which_field_is_wrong_and_how() -> None:
    assert "temperature must be 0-2, got nan - at `$[3]`" in str(
        refused([ADD, BAD_ADDS["NaN temperature"]])
    )
    assert "frame 2 is absent" in str(refused([ADD, BAD_ADDS["absent frame"], b""]))


@pytest.mark.parametrize("request_id", [1.5, 1, None, b"r1", ["r1"], {}, True])
def test_add_without_a_readable_id_names_none(request_id: Any) -> None:
    assert refused([ADD, add(request_id=request_id)]).request_id is None


@pytest.mark.parametrize("client_index", [-1, 1.5, "0", None, True])
def test_unreadable_client_is_client_0(client_index: Any) -> None:
    error = refused([ADD, add(client_index=client_index, arrival_time="x")])
    assert (error.request_id, error.client_index) == ("r1", 0)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x04", packed(["r1"])],
        [b"\x05", packed(["r1"])],
        [b"\x00\x00", add()],
        [b"READY"],
        [bytes(1000)],
    ],
)
def test_unknown_type_is_refused(frames: list[bytes]) -> None:
    error = refused(frames)
    assert (error.kind, error.request_id, error.call_id) == (None, None, None)


@pytest.mark.parametrize("kind", [ADD, ABORT, WAVE, UTILITY])
@pytest.mark.parametrize(
    "rest", [[], [b""], [b"\xc0"], [b"\xc1"], [DEEP], [b"\xdd\xff\xff\xff\xff"]]
)
def test_body_that_is_none_is_refused(kind: bytes, rest: list[bytes]) -> None:
    assert refused([kind, *rest]).kind == kind


@pytest.mark.parametrize("body", [None, [[1]], ["r1", 2], ["r1", None], 1, {"r1": 1}, b"r1"])
def test_abort_of_anything_but_ids_aborts_nothing(body: Any) -> None:
    assert refused([ABORT, packed(body)]).kind is EngineCoreRequestType.ABORT


@pytest.mark.parametrize("body", [[], [None], ["1"], [1, 1.5], {}])
def test_bad_wave_is_refused(body: Any) -> None:
    assert refused([WAVE, packed(body)]).kind is EngineCoreRequestType.START_DP_WAVE


CALL_ID = 2**64 - 1


@pytest.mark.parametrize(
    "body",
    [
        packed([3, CALL_ID, "sleep"]),
        packed([3, CALL_ID, "sleep", [], 5]),
        packed([3, CALL_ID]),
        packed([3, CALL_ID, None, []]),
        packed([3, CALL_ID, b"sleep", []]),
        packed([3, CALL_ID, "sleep", None]),
        packed([3, CALL_ID, "sleep", {}]),
        packed([3, CALL_ID, "sleep", [ext(pickle.dumps(print), 1)]]),
        packed([3, CALL_ID, "sleep", []])[:-1],
        packed([3, CALL_ID, "sleep", []]) + b"\x00",
        packed([3, CALL_ID, "sleep", ["@"]]).replace(b"\xa1@", DEEP),
    ],
)
def test_bad_utility_names_its_call(body: bytes) -> None:
    error = refused([UTILITY, body])
    assert (error.call_id, error.client_index) == (CALL_ID, 3)


@pytest.mark.parametrize("call_id", [-1, 1.5, None, "1"])
def test_utility_without_a_readable_call_names_none(call_id: Any) -> None:
    assert refused([UTILITY, packed([3, call_id, "sleep", []])]).call_id is None


@pytest.mark.parametrize("length", [5, 40, 300, 70_000])
@pytest.mark.parametrize("num_fields", [12, 20, 70_000])
def test_id_is_read_whatever_its_length_and_the_number_of_fields(
    length: int, num_fields: int
) -> None:
    fields = ["r" * length, *range(num_fields)]
    assert refused([ADD, packed(fields)[:-1]]).request_id == "r" * length


@pytest.mark.parametrize(
    "body",
    [
        b"\x9f",
        b"\x9f\xa5abc",
        b"\x9f\xa1\xff",
        b"\x9f\xdb",
        b"\x9f\xdb\xff\xff\xff\xff",
        b"\x9f\x91\xa1r\xc1",
        b"\x81\xa1r\xc1",
    ],
)
def test_id_that_is_cut_off_is_not_guessed(body: bytes) -> None:
    assert refused([ADD, body]).request_id is None


def outputs_with(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "new_token_ids": [1],
        "new_logprobs": None,
        "prompt_logprobs": None,
        "pooling_output": None,
        "finish_reason": None,
    }
    return packed([0, [list((fields | changes).values())]])


def logprobs(dtype: Any, shape: Any, data: Any) -> bytes:
    good = ["<i4", [1], ext(bytes(4))]
    return outputs_with(new_logprobs=[[dtype, shape, data], good, good, None])


BAD_OUTPUTS = {
    "nothing": b"",
    "dead notice": b"ENGINE_CORE_DEAD",
    "map": packed({}),
    "truncated": outputs_with()[:-1],
    "trailing": outputs_with() + b"\x00",
    "too deep": DEEP,
    "finish_reason 5": outputs_with(finish_reason=5),
    "tokens are nil": outputs_with(new_token_ids=None),
    "id is a number": outputs_with(request_id=1),
    "nil prefix cache stats": packed([0, [], {"prefix_cache_stats": None}]),
    "result with a type": packed([0, [], None, 1.0, [1, None, ["builtins.int", 1]]]),
    "result of three parts": packed([0, [], None, 1.0, [1, None, [None, 1, 2]]]),
    "pickled result": packed([0, [], None, 1.0, [1, None, [None, ext(b"", 2)]]]),
    "object array": logprobs("|O", [1], ext(bytes(8))),
    "records": logprobs("<i4,<f4", [1], ext(bytes(8))),
    "text array": logprobs("<U1", [1], ext(bytes(4))),
    "long double": logprobs("<f16", [1], ext(bytes(16))),
    "torch dtype of an ndarray": logprobs("float32", [1], ext(bytes(4))),
    "dtype is a list": logprobs(["<f4"], [1], ext(bytes(4))),
    "short array": logprobs("<f4", [2], ext(bytes(4))),
    "absurd array": logprobs("<f4", [2**40, 2**40], 1),
    "absurd empty array": logprobs("<f4", [0, 2**62, 2**62], ext(b"")),
    "array of negative size": logprobs("<f4", [-1], ext(b"")),
    "two arrays of logprobs": outputs_with(new_logprobs=[["<i4", [1], ext(bytes(4))]] * 2),
}


@pytest.mark.parametrize("body", BAD_OUTPUTS.values(), ids=BAD_OUTPUTS)
def test_bad_outputs_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot decode EngineCoreOutputs"):
        OutputsDecoder().decode([body, bytes(4)])


def test_outputs_message_without_frames_is_refused() -> None:
    with pytest.raises(ProtocolError, match="without frames"):
        OutputsDecoder().decode([])


def test_decoder_is_as_good_as_new_after_a_bad_message() -> None:
    decoder = RequestDecoder()
    with pytest.raises(UndecodableRequest):
        decoder.decode([ADD, embeds("float32", [3], 1), bytes(8)])
    # Frames of the bad message must not serve the next one.
    with pytest.raises(UndecodableRequest, match="absent"):
        decoder.decode([ADD, embeds("float32", [2], 1)])
    decoder.decode([ADD, embeds("float32", [2], 1), bytes(8)])


# Any bytes. Three sources: noise, well-formed msgpack of any shape, and recorded messages with
# some bytes changed, which get furthest.

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(ext, st.binary(max_size=8), st.integers(-128, 127))
    | st.sampled_from(["<f4", "float32", "|b1", [1], [2, 2]]),
    lambda inner: (
        st.lists(inner, max_size=13) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def changed_recordings(draw: st.DrawFn) -> bytes:
    frame = bytearray.fromhex(draw(st.sampled_from(RECORDED))["frames_hex"][0])
    for _ in range(draw(st.integers(0, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))] if draw(st.booleans()) else frame)


bodies = st.binary(max_size=200) | st.builds(packed, values) | changed_recordings()
messages = st.builds(
    lambda body, aux: [*body, *aux],
    st.lists(bodies, max_size=2),
    st.lists(st.binary(max_size=8), max_size=2),
)
moderate = settings(deadline=None, max_examples=60)


@given(st.sampled_from([ADD, ABORT, WAVE, UTILITY]), messages)
@example(ADD, [b"\x9f\xd7\xff" + b"\xff" * 8])
@moderate
def test_any_body_is_a_request_or_a_protocol_error(kind: bytes, rest: list[bytes]) -> None:
    with contextlib.suppress(UndecodableRequest):
        RequestDecoder().decode([kind, *rest])


@given(messages)
@moderate
def test_any_frames_are_a_request_or_a_protocol_error(frames: list[bytes]) -> None:
    with contextlib.suppress(UndecodableRequest):
        RequestDecoder().decode(frames)


@given(messages)
@moderate
def test_any_frames_are_outputs_or_a_protocol_error(frames: list[bytes]) -> None:
    with contextlib.suppress(ProtocolError):
        OutputsDecoder().decode(frames)


@pytest.mark.parametrize(
    "wanted", [StatusMessage, Init, ReadyResponse, CoordinatorUpdate, FirstRequestNotice]
)
@given(frame=bodies)
@settings(deadline=None, max_examples=20)
def test_any_frame_is_a_control_message_or_a_protocol_error(wanted: Any, frame: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_control(frame, wanted)
