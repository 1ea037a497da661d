"""Brings a model onto a device: files, weights, KV cache, runner.

Layer: model. What depends on options, model and machine together is decided here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from trio_engine.checkpoint import locate_model
from trio_engine.core.plan import ExecutorProperties
from trio_engine.errors import ConfigError
from trio_engine.model.decode_graphs import CudaRecorder
from trio_engine.model.decoder import Decoder
from trio_engine.model.device import dtype_name, out_of_memory_as, resolve_device, resolve_dtype
from trio_engine.model.kv_cache import KVCache, KVCacheShape, choose_num_blocks
from trio_engine.model.linear_backend import check_linear_backend, choose_linear_backend
from trio_engine.model.loader import open_checkpoint
from trio_engine.model.memory import free_bytes
from trio_engine.model.quantization import check_can_quantize
from trio_engine.model.runner import ModelRunner
from trio_engine.model.sleep import ModelMemory
from trio_engine.model.weights import WeightForm, load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trio_engine.checkpoint import ModelFiles
    from trio_engine.config import EngineConfig
    from trio_engine.model.config import ModelConfig
    from trio_engine.model.loader import Checkpoint
    from trio_engine.model.weights import DecoderWeights

logger = logging.getLogger(__name__)

CUDA_STEP_TOKENS = 8192

# Half a second at the 70 GFLOP/s that two AVX2 cores reach.
_CPU_STEP_FLOPS = 35e9
_MOST_CPU_STEP_TOKENS = 256
_RESERVED_BYTES = 256 << 20
# What all graphs gather to, and as much again for their own memory and the driver's.
_GRAPH_BYTES = 512 << 20


class LoadedModel(NamedTuple):
    """A runner, what it can do, and its memory, to be given back and taken again."""

    runner: ModelRunner
    properties: ExecutorProperties
    memory: ModelMemory


def load_model(
    config: EngineConfig, on_progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Loads what an engine's options name.

    Args:
        config: all model and memory options are read.
        on_progress: told loaded and total bytes of the checkpoint as it is read.

    Raises:
        ModelError: the model is missing, damaged or unsupported.
        ConfigError: an option cannot work with this model or machine, or memory ran out.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.cuda_graphs and device.type != "cuda":
        raise ConfigError(f"cuda_graphs need device 'cuda', not {device.type!r}")
    check_can_quantize(config.quantization, device)
    check_linear_backend(config, device, dtype)
    files = locate_model(config.model)
    with out_of_memory_as(ConfigError, f"loading model {config.model!r} as {dtype_name(dtype)}"):
        checkpoint = open_checkpoint(files)
        form = _choose_form(config, checkpoint.config, device, dtype)
        weights = form.apply(_load_weights(checkpoint, device, dtype, on_progress))
        return _load_runner(config, files, Decoder(checkpoint.config, weights), form)


def _choose_form(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> WeightForm:
    if config.quantization is not None:
        return WeightForm(quantization=config.quantization)
    backend = choose_linear_backend(config.linear_backend, model, device, dtype)
    logger.info("linear_backend_chosen name=%s", backend)
    return WeightForm(linear_backend=backend)


def _load_weights(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None,
) -> DecoderWeights:
    num_bytes = checkpoint.num_bytes

    def report(share: float) -> None:
        if on_progress is not None:
            on_progress(round(share * num_bytes), num_bytes)

    report(0.0)
    return load_weights(checkpoint.config, checkpoint.tensors(), dtype, device, report)


def _load_runner(
    config: EngineConfig, files: ModelFiles, decoder: Decoder, form: WeightForm
) -> LoadedModel:
    model, device = decoder.config, decoder.device
    max_model_len = min(config.max_model_len or model.context_length, model.context_length)
    step_tokens = default_step_tokens(model, is_cpu=device.type == "cpu")
    shape = KVCacheShape.of(model, config.block_size, decoder.dtype)
    room = free_bytes(device) - _reserve(config, model, step_tokens)
    num_blocks = choose_num_blocks(
        config, shape, max_model_len, max(0, room), is_cpu=device.type == "cpu"
    )
    cache = KVCache(shape, num_blocks, device, decoder.dtype)
    runner = ModelRunner(
        decoder,
        cache,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        launches_ahead=device.type != "cpu",
        recorder=CudaRecorder() if config.cuda_graphs else None,
    )
    properties = ExecutorProperties(
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        dtype=dtype_name(decoder.dtype),
        default_max_num_batched_tokens=step_tokens,
        hidden_size=model.hidden_size,
    )
    return LoadedModel(runner, properties, ModelMemory(files, decoder, cache, form))


def default_step_tokens(model: ModelConfig, *, is_cpu: bool) -> int:
    """Tokens of one step; on CPU so few that it takes about half a second, in whole 32s.

    The embedding is counted once: an untied head is computed for few of a step's tokens.
    """
    if not is_cpu:
        return CUDA_STEP_TOKENS
    heads = model.num_heads + model.num_kv_heads
    attention = 2 * model.hidden_size * model.head_dim * heads
    mlp = 3 * model.hidden_size * model.intermediate_size
    flops_per_token = 2 * model.num_layers * (attention + mlp)
    tokens = int(_CPU_STEP_FLOPS / flops_per_token) // 32 * 32
    return max(32, min(_MOST_CPU_STEP_TOKENS, tokens))


def _reserve(config: EngineConfig, model: ModelConfig, default_step_tokens: int) -> int:
    """Bytes that a step needs beside weights and KV cache, roughly and rather too many.

    Logits are held up to eight times while rows are sampled (float32, raw log probabilities,
    counts for penalties, ordered, float64 sums);
    activations of a layer about four times its widest product.
    """
    step_tokens = config.max_num_batched_tokens or default_step_tokens
    logits = min(config.max_num_seqs, step_tokens) * model.vocab_size * 4 * 8
    widest = max(2 * model.intermediate_size, (model.num_heads + 2) * model.head_dim)
    graphs = _GRAPH_BYTES if config.cuda_graphs else 0
    return logits + step_tokens * (widest + model.hidden_size) * 4 * 4 + graphs + _RESERVED_BYTES
