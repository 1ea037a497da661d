"""What a front end asks of an engine: the struct that clients build and the core accepts.

Pure. The field order is the wire form (vLLM 0.25.1, ``vllm/v1/engine/__init__.py``), so that a
request needs no translation between client, wire and core.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from trio_engine.sampling_params import SamplingParams
from trio_engine.tensors import TensorData

SERVED_TASK = "generate"


class LoRARequest(msgspec.Struct, array_like=True):
    """A LoRA adapter by name, id (>= 1) and folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class EngineCoreRequest(msgspec.Struct, array_like=True):
    """One request to the engine core. The first nine fields are required on the wire.

    ``prompt_token_ids`` and ``prompt_embeds`` ``[num_prompt_tokens, hidden]`` may both be given
    with ``prompt_is_token_ids`` telling which holds at each position. ``arrival_time`` is wall
    clock, in seconds; it only breaks ties of equal ``priority`` (lower runs first).
    """

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[dict[str, Any]] | None
    sampling_params: SamplingParams | None
    pooling_params: list[Any] | None
    arrival_time: float
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: TensorData | None = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False


class PauseMode(enum.StrEnum):
    """What a pause does with requests: end them, let running ones finish, or freeze all."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class SleepTag(enum.StrEnum):
    """What can be woken up by itself: two kinds of memory, and the scheduling that needs both."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"
