"""Every message recorded from vLLM 0.25.1 decodes to its meaning and encodes to its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.tensors import TensorData
from trio_engine.wire.arrays import ArrayReader, ArrayWriter, ext_hook
from trio_engine.wire.codec import (
    OutputsDecoder,
    OutputsEncoder,
    RequestDecoder,
    RequestEncoder,
    UndecodableRequest,
    decode_control,
    encode_control,
    is_engine_core_dead,
)
from trio_engine.wire.messages import (
    AbortRequest,
    CoordinatorUpdate,
    EngineCoreRequestType,
    EngineLoad,
    FirstRequestNotice,
    Init,
    ReadyResponse,
    StartDPWave,
    StatusMessage,
    UtilityCall,
)

if TYPE_CHECKING:
    from trio_engine.outputs import EngineCoreOutputs

DATA = Path(__file__).parents[2] / "data" / "vllm-0.25.1.json"
VECTORS: dict[str, dict[str, Any]] = {
    vector["name"]: vector for vector in json.loads(DATA.read_text())
}
BY_HAND = {name for name, vector in VECTORS.items() if "made by hand" in (vector["note"] or "")}

REQUEST_TYPE = {
    "EngineCoreRequest": EngineCoreRequestType.ADD,
    "abort body": EngineCoreRequestType.ABORT,
    "utility body": EngineCoreRequestType.UTILITY,
    "wave body": EngineCoreRequestType.START_DP_WAVE,
}
CONTROL: dict[str, type[Any]] = {
    "hello": StatusMessage,
    "hello_outside": StatusMessage,
    "hello_external_lb": StatusMessage,
    "ready": StatusMessage,
    "ready_moe": StatusMessage,
    "init": Init,
    "init_dp": Init,
    "init_two_api_servers": Init,
    "ready_response": ReadyResponse,
    "coord_first_request": FirstRequestNotice,
    "coord_counts": CoordinatorUpdate,
    "coord_wave": CoordinatorUpdate,
}
REFUSED = "add_embeds_out_of_band"


def frames_of(name: str) -> list[bytes]:
    return [bytes.fromhex(text) for text in VECTORS[name]["frames_hex"]]


def names_of(*kinds: str) -> list[str]:
    return [name for name, vector in VECTORS.items() if vector["kind"] in kinds]


REQUESTS = [name for name in names_of(*REQUEST_TYPE) if name != REFUSED]
OUTPUTS = names_of("EngineCoreOutputs")
ARRAYS = names_of("tensor", "ndarray")


def request_frames(name: str) -> list[bytes]:
    return [REQUEST_TYPE[VECTORS[name]["kind"]].value, *frames_of(name)]


def decode_request(name: str) -> Any:
    return RequestDecoder().decode(request_frames(name))


def decode_outputs(name: str) -> EngineCoreOutputs:
    return OutputsDecoder().decode(frames_of(name))


def untyped(body: bytes | memoryview) -> Any:
    return msgspec.msgpack.decode(body, ext_hook=lambda code, data: ("ext", code, bytes(data)))


def test_no_vector_is_left_out() -> None:
    covered = [*REQUESTS, REFUSED, *OUTPUTS, *ARRAYS, *CONTROL, "engine_core_dead"]
    assert sorted(covered) == sorted(VECTORS)
    assert len(covered) == 96


@pytest.mark.parametrize("name", REQUESTS)
def test_request_encodes_to_the_recorded_bytes(name: str) -> None:
    original = request_frames(name)
    message = decode_request(name)
    again = [bytes(frame) for frame in RequestEncoder().encode(message)]
    if isinstance(message, EngineCoreRequest) and message.sampling_params is not None:
        # Which defaults a SamplingParams map spells out is the sender's choice.
        assert again[0] == original[0]
        assert again[2:] == original[2:]
        body, body_again = untyped(original[1]), untyped(again[1])
        assert body_again[:3] == body[:3]
        assert body_again[4 : len(body)] == body[4:]
        assert RequestDecoder().decode(again) == message
    else:
        assert again == original


@pytest.mark.parametrize("name", [name for name in REQUESTS if name.startswith("add_")])
def test_sampling_params_mean_what_the_map_says(name: str) -> None:
    params = decode_request(name).sampling_params
    if params is None:
        assert name == "add_pooling"
        return
    wanted = by_wire_name(SamplingParams()) | VECTORS[name]["body"][3]
    stop_ids = [*wanted["_all_stop_token_ids"], *(wanted["stop_token_ids"] or [])]
    wanted["_all_stop_token_ids"] = set(stop_ids)
    if wanted["logit_bias"]:  # the file is JSON, where every key is a string
        wanted["logit_bias"] = {int(token): bias for token, bias in wanted["logit_bias"].items()}
    assert by_wire_name(params) == wanted


def by_wire_name(params: SamplingParams) -> dict[str, Any]:
    values = {
        field.encode_name: getattr(params, field.name)
        for field in msgspec.structs.fields(SamplingParams)
    }
    for nested in ("structured_outputs", "repetition_detection"):
        values[nested] = values[nested] and msgspec.to_builtins(values[nested])
    return values


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_encode_to_the_recorded_bytes(name: str) -> None:
    outputs = decode_outputs(name)
    again = [bytes(frame) for frame in OutputsEncoder().encode(outputs)]
    if name in BY_HAND:
        assert OutputsDecoder().decode(again) == outputs
    else:
        assert again == frames_of(name)


@pytest.mark.parametrize("name", CONTROL)
def test_control_message_encodes_to_the_recorded_bytes(name: str) -> None:
    (frame,) = frames_of(name)
    message = decode_control(frame, CONTROL[name])
    assert encode_control(message) == frame
    wanted = VECTORS[name]["decoded"]
    got = msgspec.to_builtins(message)
    if name == "coord_first_request":
        assert message == FirstRequestNotice(engine_identity=b"\x01\x00", wave=4)
    elif isinstance(wanted, dict):
        assert {key: got[key] for key in wanted} == wanted
    else:
        assert json.loads(json.dumps(got)) == wanted


@pytest.mark.parametrize("name", ARRAYS)
def test_array_holds_the_recorded_values_and_encodes_to_the_recorded_bytes(name: str) -> None:
    body, *aux = frames_of(name)
    wanted_type = TensorData if VECTORS[name]["kind"] == "tensor" else np.ndarray[Any, Any]
    reader = ArrayReader()
    reader.frames = aux
    array = msgspec.msgpack.decode(
        body, type=wanted_type, dec_hook=reader.dec_hook, ext_hook=ext_hook
    )
    meaning = VECTORS[name]["decoded"]
    values: Any = array
    if isinstance(array, TensorData):
        assert (array.dtype, list(array.shape)) == (meaning["dtype"], meaning["shape"])
        values = array.to_numpy()
    else:
        assert (values.dtype.str, list(values.shape)) == (meaning["dtype"], meaning["shape"])
    # Of an array without elements only the shape is left to compare.
    assert values.tolist() == meaning["values"] or values.size == 0 == len(meaning["values"])

    writer = ArrayWriter(give_up_arrays=True)
    again = msgspec.msgpack.Encoder(enc_hook=writer.enc_hook).encode(array)
    assert [again, *map(bytes, writer.take_frames())] == [body, *aux]


def test_tensor_in_shared_memory_is_refused_to_its_request() -> None:
    with pytest.raises(UndecodableRequest, match="shared memory") as caught:
        decode_request(REFUSED)
    assert caught.value.request_id == "r1"


def test_dead_notice_is_recognized() -> None:
    assert is_engine_core_dead(frames_of("engine_core_dead"))
    assert not is_engine_core_dead(frames_of("outputs_tokens"))


def test_adds_mean_what_was_recorded() -> None:
    minimal = decode_request("add_minimal")
    assert (minimal.request_id, minimal.prompt_token_ids) == ("r1", [1, 2, 3])
    assert (minimal.sampling_params.max_tokens, minimal.sampling_params.temperature) == (5, 0.0)
    lora = decode_request("add_lora").lora_request
    assert [lora.lora_name, lora.lora_int_id, lora.lora_path] == ["ad", 3, "/adapters/ad"]
    trace = decode_request("add_resumable_trace")
    assert trace.trace_headers == {"traceparent": "00-abc"}
    assert (trace.resumable, trace.reasoning_ended, trace.abort_immediately) == (True, True, True)
    structured = decode_request("add_structured_json").sampling_params.structured_outputs
    assert structured.json == {"type": "object"}
    assert decode_request("add_serve_completion").request_id == "cmpl-x-0-0a1b2c3d"
    assert decode_request("add_child_1_of_2").sampling_params.seed == 41
    assert decode_request("add_multimodal").mm_features[0]["modality"] == "image"
    assert decode_request("add_pooling").pooling_params[4] == "embed"


def test_prompt_embeds_hold_the_recorded_values() -> None:
    small = decode_request("add_prompt_embeds_small").prompt_embeds
    assert small.to_numpy().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    big = decode_request("add_prompt_embeds_big").prompt_embeds
    meaning = VECTORS["add_prompt_embeds_big"]["decoded"]
    assert list(big.shape) == meaning["shape"]
    assert big.to_numpy().sum(dtype=np.float64) == pytest.approx(meaning["sum"], abs=1e-5)
    mixed = decode_request("add_embeds_mixed")
    assert mixed.prompt_embeds.to_numpy().tolist() == [[1.0] * 4] * 3
    assert mixed.prompt_is_token_ids == [True, False, True]


def test_other_requests_mean_what_was_recorded() -> None:
    assert decode_request("abort_two") == AbortRequest(["r1", "r2"])
    assert decode_request("utility_call") == UtilityCall(
        client_index=0,
        call_id=12345678901234567890,
        method="reset_prefix_cache",
        args=[False, False],
    )
    assert decode_request("start_dp_wave") == StartDPWave(4, None)
    assert decode_request("start_dp_wave_index") == StartDPWave(4, 1)
    assert decode_request("start_dp_wave_identity") == StartDPWave(4, b"\x01\x00")


def test_logprobs_hold_the_recorded_values() -> None:
    logprobs = decode_outputs("outputs_logprobs").outputs[0].new_logprobs
    meaning = VECTORS["outputs_logprobs"]["decoded"]
    assert logprobs is not None
    assert logprobs.logprob_token_ids.tolist() == meaning["ids"]
    np.testing.assert_allclose(logprobs.logprobs, meaning["logprobs"])
    assert logprobs.sampled_token_ranks.tolist() == meaning["ranks"]
    several = decode_outputs("outputs_logprobs_aux")
    assert [entry.request_id for entry in several.outputs] == ["r1", "r2"]
    assert several.outputs[1].new_logprobs.logprobs.shape == (1, 100)  # type: ignore[union-attr]


def test_coordinator_counts_are_named() -> None:
    (frame,) = frames_of("coord_counts")
    update = decode_control(frame, CoordinatorUpdate)
    assert update == CoordinatorUpdate([EngineLoad(0, 1), EngineLoad(2, 3)], 4, True)
    assert update.loads is not None
    assert update.loads[1].running == 3
