"""Tiny random models of the four families, as Hugging Face folders and as GGUF files.

The GGUF writer lays weights out as llama.cpp's converter does: the rows of q and k are permuted
for the llama architecture, and llama3's frequencies become a tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Array = np.ndarray[Any, Any]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def make_model(family: str, *, seed: int = 0, **config_overrides: Any) -> Any:
    """Builds a transformers model in float32 whose every parameter is random, biases too."""
    import transformers

    values = _TINY | ({"head_dim": 32} if family == "qwen3" else {}) | config_overrides
    config = getattr(transformers, f"{_CLASSES[family]}Config")(**values)
    model = getattr(transformers, f"{_CLASSES[family]}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.1, generator=generator)
    return model


def make_hf_folder(
    family: str, path: Path, *, shards: int = 1, **config_overrides: Any
) -> tuple[Path, Any]:
    """Saves a tiny model with ``save_pretrained``.

    Args:
        family: one of ``FAMILIES``.
        path: the folder to write.
        shards: how many safetensors files, or a few more.
        config_overrides: for the family's transformers configuration.

    Returns:
        The folder, and the transformers model as saved.
    """
    from transformers.utils import logging

    # A bar starts a thread that nobody joins.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = make_model(family, **config_overrides)
    num_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(path, max_shard_size=math.ceil(num_bytes / shards) + 4096 // shards)
    return path, model


def make_gguf(
    family: str,
    path: Path,
    model: Any,
    quantization: str = "F32",
    *,
    encode: Callable[[Array, gguf.GGMLQuantizationType], Array] = gguf.quants.quantize,
) -> Path:
    """Writes a transformers model as one GGUF file.

    Args:
        family: one of ``FAMILIES``.
        path: the file to write.
        model: from ``make_model`` or ``make_hf_folder``.
        quantization: of the matrices; a type that ``encode`` can quantize to. Norms and biases
            stay F32, as do matrices whose rows are no whole number of blocks.
        encode: quantizes a matrix; the default cannot do K types.

    Returns:
        ``path``.
    """
    arch = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, model.config)
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permute_for_llama(array, _heads_of(name, model.config))
        kind = _kind_for(array, quantization)
        writer.add_tensor(_gguf_name(name_map, name), encode(array, kind), raw_dtype=kind)
    _write_rope(writer, model.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute_for_llama(array: Array, num_heads: int) -> Array:
    """Moves rows of q or k from Hugging Face's half layout to llama.cpp's pair layout."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _gguf_name(name_map: gguf.TensorNameMap, hf_name: str) -> str:
    base, dot, kind = hf_name.rpartition(".")
    mapped = name_map.get_name(base)  # Qwen3's table has all names of the other families too
    assert mapped is not None, hf_name
    return mapped + dot + kind


def _heads_of(name: str, config: Any) -> int:
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return int(heads)


def _kind_for(array: Array, quantization: str) -> gguf.GGMLQuantizationType:
    kind = gguf.GGMLQuantizationType[quantization]
    block_size, _ = gguf.GGML_QUANT_SIZES[kind]
    fits = array.ndim == 2 and array.shape[-1] % block_size == 0
    return kind if fits else gguf.GGMLQuantizationType.F32


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if getattr(config, "sliding_window", None) and config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def _write_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _llama3_factors(config: Any) -> Array:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = config.rope_parameters["rope_theta"] ** -exponents
    factors: Array = (plain / stretched).numpy().astype(np.float32)
    return factors
