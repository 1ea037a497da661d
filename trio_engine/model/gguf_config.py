"""Parses the configuration out of a GGUF header, as llama.cpp reads it.

Layer: model, without torch. What the metadata leaves open is told by the tensors: biases, tied
embeddings, the size of the vocabulary and llama3's frequencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.errors import ModelError
from trio_engine.model.config import Architecture, ModelConfig, RopeConfig, check_config
from trio_engine.model.fields import Fields
from trio_engine.model.hf_rope import yarn_mscale

if TYPE_CHECKING:
    from trio_engine.gguf_metadata import GGUFFile, TensorInfo

ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")
_DEFAULT_THETA = 10000.0  # llama.cpp's
_MAX_LAYERS = 10_000
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGML_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}


def parse_gguf_config(file: GGUFFile) -> ModelConfig:
    """Makes sense of a header.

    Raises:
        ModelError: a key is missing, nonsense or unsupported; names file, key and value.
    """
    architecture = _architecture(file)
    fields = Fields(file.path, file.metadata, prefix=f"{architecture}.")
    _refuse_unsupported(file, fields)
    return check_config(_config(file, architecture, fields), file.path)


def _config(file: GGUFFile, architecture: Architecture, fields: Fields) -> ModelConfig:
    tokens = Fields(file.path, file.metadata, prefix="tokenizer.ggml.")
    tensors = {tensor.name: tensor for tensor in file.tensors}
    vocab_size = _vocab_size(file, tensors)
    num_layers = fields.integer("block_count", maximum=_MAX_LAYERS)
    num_heads = fields.integer("attention.head_count")
    head_dim = _head_dim(fields, num_heads)
    sliding_window = _sliding_window(fields, architecture)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=fields.integer("context_length"),
        rope=_rope(file, fields, tensors.get(ROPE_FACTORS), head_dim),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=sliding_window,
        layer_is_sliding=(sliding_window is not None,) * num_layers,
        bos_token_id=next(iter(tokens.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=_end_tokens(tokens, vocab_size),
        dtype=_dtype(file),
    )


def _architecture(file: GGUFFile) -> Architecture:
    general = Fields(file.path, file.metadata, prefix="general.")
    name = general.text("architecture")
    for architecture in _ARCHITECTURES:
        if name == architecture:
            return architecture
    general.fail("architecture", f"unsupported; one of {', '.join(_ARCHITECTURES)} is")


def _vocab_size(file: GGUFFile, tensors: dict[str, TensorInfo]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: has no matrix token_embd.weight")
    return embedding.shape[0]


def _refuse_unsupported(file: GGUFFile, fields: Fields) -> None:
    if fields.integer("expert_count", 0, minimum=0):
        fields.fail("expert_count", "mixtures of experts are unsupported")
    split = Fields(file.path, file.metadata, prefix="split.")
    if split.integer("count", 0, minimum=0) > 1:
        split.fail("count", "models in several GGUF files are unsupported; merge them first")


def _head_dim(fields: Fields, num_heads: int) -> int:
    hidden_size = fields.integer("embedding_length")
    if "attention.key_length" not in fields and hidden_size % num_heads:
        fields.fail("attention.head_count", f"does not divide embedding_length = {hidden_size}")
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            fields.fail(key, f"unsupported: differs from the head's width of {head_dim}")
    return head_dim


def _sliding_window(fields: Fields, architecture: Architecture) -> int | None:
    window = fields.integer("attention.sliding_window", 0, minimum=0)
    if window and architecture != "llama":
        fields.fail("attention.sliding_window", "unsupported: does not say which layers slide")
    if "attention.sliding_window_pattern" in fields:
        fields.fail("attention.sliding_window_pattern", "unsupported")
    return window or None


def _rope(file: GGUFFile, fields: Fields, factors: TensorInfo | None, head_dim: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", _DEFAULT_THETA)
    kind = fields.text("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            fields.fail("rope.scaling.type", f"unsupported together with {ROPE_FACTORS}")
        freq_factors = _read_factors(file, factors, head_dim)
        return RopeConfig(kind="factors", theta=theta, freq_factors=freq_factors)
    if kind == "yarn":
        return _yarn(fields, theta)
    # Old files have scale_linear and no type.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and "rope.scale_linear" in fields):
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind != "none":
        fields.fail("rope.scaling.type", "unsupported; none, linear and yarn are")
    return RopeConfig(theta=theta)


def _yarn(fields: Fields, theta: float) -> RopeConfig:
    for key in ("yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"):
        if f"rope.scaling.{key}" in fields:
            fields.fail(f"rope.scaling.{key}", "unsupported")
    factor = fields.number("rope.scaling.factor")
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * yarn_mscale(factor),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _read_factors(file: GGUFFile, info: TensorInfo, head_dim: int) -> tuple[float, ...]:
    if info.shape != (head_dim // 2,) or info.ggml_type != 0:
        raise ModelError(
            f"{file.path}: {info.name} has shape {info.shape} and type {info.ggml_type}, expected "
            f"{(head_dim // 2,)} of F32"
        )
    values = np.fromfile(file.path, "<f4", count=head_dim // 2, offset=info.offset)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelError(f"{file.path}: {info.name} holds a factor that is not positive and finite")
    return tuple(values.tolist())


def _end_tokens(tokens: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = [token for key in _END_TOKENS for token in tokens.token_ids(key, vocab_size)]
    return tuple(dict.fromkeys(ids))


def _dtype(file: GGUFFile) -> str:
    types = {tensor.ggml_type for tensor in file.tensors if len(tensor.shape) == 2}
    return _GGML_DTYPES.get(types.pop(), "float32") if len(types) == 1 else "float32"
