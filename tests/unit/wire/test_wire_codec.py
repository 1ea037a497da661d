"""Roundtrips, arrays without copies, and what has no wire form."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from trio_engine.errors import ProtocolError
from trio_engine.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    LogprobsLists,
    LogprobsTensors,
    SchedulerStats,
    UtilityOutput,
    UtilityResult,
)
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.tensors import TensorData
from trio_engine.wire.arrays import NDARRAY_DTYPES, ZERO_COPY_THRESHOLD_BYTES
from trio_engine.wire.codec import (
    OutputsDecoder,
    OutputsEncoder,
    RequestDecoder,
    RequestEncoder,
    decode_control,
    encode_control,
)
from trio_engine.wire.messages import AbortRequest, Init, StartDPWave, UtilityCall


def request(**changes: Any) -> EngineCoreRequest:
    made = EngineCoreRequest("r", [1, 2], None, SamplingParams(), None, 1.5, None, None, None)
    return msgspec.structs.replace(made, **changes)


def entry_with_logprobs(array: np.ndarray[Any, Any]) -> EngineCoreOutputs:
    lists = LogprobsLists(array, array, array)
    return EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1], new_logprobs=lists)])


def utility_result(value: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(utility_output=UtilityOutput(1, result=UtilityResult(None, value)))


def test_large_array_is_neither_copied_out_nor_in() -> None:
    sent = np.arange(1000, dtype=np.float32).reshape(10, 100)
    frames = OutputsEncoder().encode(entry_with_logprobs(sent))
    assert [len(frame) for frame in frames[1:]] == [4000] * 3
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), sent)
    logprobs = OutputsDecoder().decode(frames).outputs[0].new_logprobs
    assert logprobs is not None
    assert np.shares_memory(logprobs.logprob_token_ids, sent)
    np.testing.assert_array_equal(logprobs.sampled_token_ranks, sent)


def test_large_tensor_is_neither_copied_out_nor_in() -> None:
    sent = np.arange(1000, dtype=np.float32).reshape(10, 100)
    frames = RequestEncoder().encode(request(prompt_embeds=TensorData.from_numpy(sent)))
    received = RequestDecoder().decode(frames)
    assert isinstance(received, EngineCoreRequest)
    assert received.prompt_embeds is not None
    assert np.shares_memory(received.prompt_embeds.to_numpy(), sent)


def test_only_arrays_that_their_owner_gave_up_are_marked_read_only() -> None:
    """Transport copies writable memory, since its owner may write there after the send."""
    array = np.zeros(1000, dtype=np.float32)
    (_, *given_up) = OutputsEncoder().encode(entry_with_logprobs(array))
    assert all(memoryview(frame).readonly for frame in given_up)
    (_, _, kept) = RequestEncoder().encode(request(prompt_embeds=TensorData.from_numpy(array)))
    assert not memoryview(kept).readonly


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("num_elements", [0, 1, 10, 1000])
def test_receiver_accepts_both_forms_at_any_size(num_elements: int, inline: bool) -> None:
    data = np.arange(num_elements, dtype=np.int32)
    where = msgspec.msgpack.Ext(3, data.tobytes()) if inline else 1
    spelled = ["<i4", [num_elements], where]
    body = [0, [["r", [1], [spelled, spelled, spelled, None]]]]
    aux = [] if inline else [data.tobytes()]
    (entry,) = OutputsDecoder().decode([msgspec.msgpack.encode(body), *aux]).outputs
    assert entry.new_logprobs is not None
    np.testing.assert_array_equal(entry.new_logprobs.logprobs, data)


@given(
    array=st.sampled_from(sorted(NDARRAY_DTYPES)).flatmap(
        lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0, min_side=0))
    ),
    transposed=st.booleans(),
)
@settings(deadline=None)
def test_any_ndarray_comes_back_as_it_was(array: np.ndarray[Any, Any], transposed: bool) -> None:
    sent = array.T if transposed else array
    received = OutputsDecoder().decode(OutputsEncoder().encode(entry_with_logprobs(sent)))
    logprobs = received.outputs[0].new_logprobs
    assert logprobs is not None
    assert logprobs.logprobs.dtype == sent.dtype
    np.testing.assert_array_equal(logprobs.logprobs, sent)


def test_every_aux_frame_finds_its_array() -> None:
    """One encoder for all messages: frames of one must not leak into the next."""
    encoder, decoder = OutputsEncoder(), OutputsDecoder()
    for start in range(3):
        one, two, three = (
            TensorData.from_numpy(np.arange(100 * step, dtype=np.int64) + start)
            for step in (1, 2, 3)
        )
        tensors = LogprobsTensors(one, two, three)
        entry = EngineCoreOutput("r", [1], new_prompt_logprobs_tensors=tensors)
        frames = encoder.encode(EngineCoreOutputs(outputs=[entry, entry]))
        assert len(frames) == 7
        for got in decoder.decode(frames).outputs:
            assert got.new_prompt_logprobs_tensors == tensors


def test_failed_encoding_leaves_nothing_to_the_next_message() -> None:
    encoder = OutputsEncoder()
    large = np.zeros(ZERO_COPY_THRESHOLD_BYTES, np.uint8)
    with pytest.raises(ProtocolError):
        encoder.encode(utility_result([large, object()]))
    assert len(encoder.encode(EngineCoreOutputs())) == 1


def test_unused_aux_frames_are_harmless() -> None:
    frames = [*RequestEncoder().encode(request()), b"", b"unused"]
    assert RequestDecoder().decode(frames) == request()


def test_fields_past_the_known_ones_are_ignored() -> None:
    body = [*msgspec.to_builtins(request()), "from a newer front end"]
    assert RequestDecoder().decode([b"\x00", msgspec.msgpack.encode(body)]) == request()


@pytest.mark.parametrize(
    "message",
    [
        AbortRequest(["a", "b"]),
        UtilityCall(client_index=1, call_id=2**64 - 1, method="m", args=[[1], {"a": None}]),
        StartDPWave(3, b"\x01\x00"),
        StartDPWave(3),
        request(client_index=3, priority=-5, trace_headers={"a": "b"}, cache_salt="s"),
    ],
)
def test_messages_to_the_engine_come_back_as_they_were(message: Any) -> None:
    assert RequestDecoder().decode(RequestEncoder().encode(message)) == message


def test_bare_string_is_an_abort_of_one_request() -> None:
    body = msgspec.msgpack.encode("r1")
    assert RequestDecoder().decode([b"\x01", body]) == AbortRequest(["r1"])


def test_frames_may_be_any_kind_of_buffer() -> None:
    for kind in (bytes, bytearray, memoryview):
        frames = [kind(frame) for frame in RequestEncoder().encode(request())]
        assert RequestDecoder().decode(frames) == request()


@given(
    st.builds(
        EngineCoreOutput,
        request_id=st.text(max_size=8),
        new_token_ids=st.lists(st.integers(0, 2**32), max_size=5),
        finish_reason=st.none() | st.sampled_from(list(range(5))),
        stop_reason=st.none() | st.integers(0, 9) | st.text(max_size=3),
        trace_headers=st.none() | st.dictionaries(st.text(max_size=2), st.text(max_size=2)),
    ),
    st.sets(st.text(max_size=3)),
)
@settings(deadline=None)
def test_outputs_come_back_as_they_were(entry: EngineCoreOutput, finished: set[str]) -> None:
    outputs = EngineCoreOutputs(
        engine_index=2,
        outputs=[entry],
        scheduler_stats=SchedulerStats(num_running_reqs=1),
        timestamp=2.5,
        finished_requests=finished,
    )
    assert OutputsDecoder().decode(OutputsEncoder().encode(outputs)) == outputs


@pytest.mark.parametrize(
    "value",
    [
        object(),
        2**64,
        "\ud800",
        np.float32(1),
        np.array([object()]),
        np.array(["text"]),
        np.zeros(1, dtype=[("a", "i4")]),
        {object(): 1},
        print,
    ],
    ids=[
        "object",
        "int-of-65-bits",
        "lone-surrogate",
        "numpy-scalar",
        "array-of-objects",
        "array-of-texts",
        "structured-array",
        "key-that-is-an-object",
        "function",
    ],
)
def test_what_has_no_wire_form_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot encode EngineCoreOutputs"):
        OutputsEncoder().encode(utility_result(value))


def test_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ProtocolError, match="recursion"):
        OutputsEncoder().encode(utility_result(value))


def test_control_message_with_a_value_that_has_no_wire_form_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot encode set"):
        encode_control({object()})


def test_control_message_ignores_unknown_keys() -> None:
    body = {"addresses": {"inputs": [], "outputs": [], "new": 1}, "parallel_config": {}, "x": 2}
    assert decode_control(msgspec.msgpack.encode(body), Init).addresses.inputs == []
