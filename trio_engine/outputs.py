"""What an engine answers: the structs that the core fills, the wire carries and clients read.

Pure. Field order is the wire form (vLLM 0.25.1, ``vllm/v1/engine/__init__.py``).
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trio_engine.tensors import TensorData


class FinishReason(enum.IntEnum):
    """Why a request ended. ``str()`` gives the word that OpenAI-style APIs use."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreEventType(enum.IntEnum):
    """A change in a request's life that latency metrics need."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct):
    """An event and its time on the engine's monotonic clock, in seconds."""

    type: EngineCoreEventType
    timestamp: float


class PrefillStats(msgspec.Struct):
    """Where a prompt's tokens came from at its first scheduling.

    ``num_prompt_tokens = num_computed_tokens + num_cached_tokens`` and
    ``num_cached_tokens = num_local_cached_tokens + num_external_cached_tokens``.
    """

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


class LogprobsLists(NamedTuple):
    """Log probabilities of the sampled tokens of one entry, ``n = len(new_token_ids)`` rows.

    ``logprob_token_ids`` ``[n, w]`` int, ``logprobs`` ``[n, w]`` float32, ``sampled_token_ranks``
    ``[n]`` int (1 is best). Column 0 is the sampled token, then the best ones in falling order.
    """

    logprob_token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    sampled_token_ranks: np.ndarray[Any, Any]
    cu_num_generated_tokens: list[int] | None = None


class LogprobsTensors(NamedTuple):
    """Log probabilities of the prompt: row i is about prompt token i + 1."""

    logprob_token_ids: TensorData
    logprobs: TensorData
    selected_token_ranks: TensorData
    cu_num_generated_tokens: list[int] | None = None


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """What became of one request since the last message about it."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    pooling_output: TensorData | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: np.ndarray[Any, Any] | None = None
    num_nans_in_logits: int = 0


class PrefixCacheStats(msgspec.Struct):
    """Prefix cache use since the last message, in tokens; ``reset`` once after a reset."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class SchedulerStats(msgspec.Struct):
    """Gauges of the scheduler, and what happened in the prefix cache since the last message."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[Any] = msgspec.field(default_factory=list)
    spec_decoding_stats: dict[str, Any] | None = None
    kv_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    running_lora_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    cudagraph_stats: dict[str, Any] | None = None
    perf_stats: dict[str, Any] | None = None


class UtilityResult(NamedTuple):
    """A utility call's result; the first place names a Python type and is refused if not None."""

    type_info: None
    value: Any


class UtilityOutput(msgspec.Struct, array_like=True):
    """The answer to a utility call: a failure message or a result, never both."""

    call_id: int
    failure_message: str | None = None
    result: UtilityResult | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """One message of an engine to one client. ``timestamp`` is monotonic, in seconds."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = msgspec.field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
