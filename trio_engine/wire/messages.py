"""The vocabulary of the wire that is not a request or an output: type bytes and small structs.

Pure, data only. Requests are in ``trio_engine.requests``, outputs in ``trio_engine.outputs``.
Field order and names are vLLM 0.25.1's, because they are the wire form.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from trio_engine.requests import EngineCoreRequest

Buffer: TypeAlias = bytes | bytearray | memoryview
"""What a decoder reads a frame from."""

Frames: TypeAlias = list[bytes | memoryview]
"""One multipart message, without routing identity."""

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""The only frame of an engine's last message after a fatal error. Not msgpack."""

COORDINATOR_READY = b"READY"
"""From the coordinator, once all engines have subscribed. Not msgpack. Later ones mean nothing."""

SUBSCRIBE_TO_ALL = b"\x01"
"""What an XSUB socket sends up to receive everything."""

NonNegative: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class EngineCoreRequestType(bytes, enum.Enum):
    """First frame of a message to an engine. vLLM's 04 and 05 never cross the wire."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


class AbortRequest(msgspec.Struct, frozen=True):
    """The client of the socket that it came by wants none of these requests any more."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A call to be answered by a ``UtilityOutput`` with the same ``call_id`` (unsigned, 64 bits).

    Arrays among ``args`` stay as they came, ``[dtype, shape, data]``: only the method knows.
    """

    client_index: int
    call_id: NonNegative
    method: str
    args: list[Any]


class StartDPWave(msgspec.Struct, array_like=True, frozen=True):
    """The coordinator starts a wave. ``excluded`` is the engine index that runs already.

    Bytes there (a routing identity that the coordinator passed on) equal no index.
    """

    wave: int
    excluded: int | bytes | None = None


EngineCoreMessage: TypeAlias = EngineCoreRequest | AbortRequest | UtilityCall | StartDPWave
"""All that an engine can be sent; what ``RequestDecoder`` returns."""


class EngineZmqAddresses(msgspec.Struct, kw_only=True):
    """Where an engine connects to; ``inputs[i]`` and ``outputs[i]`` belong to client i."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class EngineStatus(enum.StrEnum):
    """How far an engine has come in its start-up."""

    HELLO = "HELLO"
    READY = "READY"


class StatusMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An engine's HELLO or READY.

    ``local``: a process that the front end spawned. ``headless``: started apart from a front
    end. Only ranks of mixture-of-experts models send ``parallel_config_hash``, with READY.
    """

    status: EngineStatus
    local: bool
    headless: bool
    parallel_config_hash: str | None = None


class Init(msgspec.Struct, kw_only=True):
    """A front end's answer to HELLO. ``parallel_config`` is empty but for mixture-of-experts."""

    addresses: EngineZmqAddresses
    parallel_config: dict[str, Any] = msgspec.field(default_factory=dict)


class ReadyResponse(msgspec.Struct, kw_only=True):
    """First message of an engine on each input socket: what it has loaded."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None


class EngineLoad(NamedTuple):
    """Requests of one engine, as the coordinator counts them."""

    waiting: int
    running: int


class CoordinatorUpdate(msgspec.Struct, array_like=True, frozen=True):
    """Coordinator to front ends: load of every engine in rank order, or None at a wave change."""

    loads: list[EngineLoad] | None
    current_wave: int
    engines_running: bool


class FirstRequestNotice(msgspec.Struct, array_like=True, frozen=True):
    """Front end to coordinator: a request went to this engine while engines seemed paused."""

    engine_identity: bytes
    wave: int
