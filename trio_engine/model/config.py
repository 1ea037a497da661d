"""What a decoder of the Llama family needs to know about a checkpoint.

Layer: model, but without torch. Parsed by ``hf_config`` and ``gguf_config``; nothing here knows a
file format.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_CONTEXT_LENGTH = 1 << 31  # far above any real model

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How positions become rotations. The whole head is rotated, in Hugging Face's half layout.

    The base frequencies are ``theta ** (-2 * i / head_dim)`` for ``0 <= i < head_dim / 2``.

    Attributes:
        kind: what is done to them. ``default``: nothing; ``linear``: divide by ``factor``;
            ``factors``: divide by ``freq_factors``, one each (how a GGUF stores ``llama3``);
            ``llama3`` and ``yarn`` as transformers defines them.
        theta: the base period.
        factor: by how much the context was stretched.
        low_freq_factor: of ``llama3``.
        high_freq_factor: of ``llama3``.
        original_max_position_embeddings: before stretching; of ``llama3`` and ``yarn``, else 0.
        attention_factor: multiplies cos and sin; already worked out from ``factor``, ``mscale``
            and ``mscale_all_dim`` where the checkpoint leaves it to them. 1.0 except for ``yarn``.
        beta_fast: of ``yarn``.
        beta_slow: of ``yarn``.
        truncate: of ``yarn``: round the bounds of its ramp to whole dimensions.
        freq_factors: of ``factors``: ``[head_dim / 2]``, else empty.
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and constants of one decoder; the four architectures differ in nothing else.

    The activation is SiLU and the norm is RMSNorm, always.

    Attributes:
        architecture: ``llama`` also for GGUF files of Mistral models, which call themselves that.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: width of a head, even; ``num_heads * head_dim`` need not be ``hidden_size``.
        rms_norm_eps: of every norm.
        max_position_embeddings: as the checkpoint says; see ``context_length``.
        rope: rotary embedding.
        tie_word_embeddings: the output projection is the embedding; there is no lm_head tensor.
        attention_bias: q, k and v projections have a bias.
        attention_out_bias: the output projection of attention has one.
        mlp_bias: gate, up and down projections have one.
        qk_norm: RMSNorm over the head, ``[head_dim]``, on q and k before rotation.
        sliding_window: tokens that a sliding layer sees, itself included; None if no layer slides.
        layer_is_sliding: ``[num_layers]``; all false where ``sliding_window`` is None.
        bos_token_id: None where the checkpoint names none.
        eos_token_ids: every token that ends a generation, the main one first; may be empty.
        dtype: torch's name of the type that the checkpoint was saved for. A quantized GGUF says
            float32.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    layer_is_sliding: tuple[bool, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def context_length(self) -> int:
        """Positions the model is good for, stretching by RoPE included, as vLLM counts them."""
        return int(_stretched_length(self))


def check_config(config: ModelConfig, source: Path) -> ModelConfig:
    """Returns the configuration if its numbers fit each other.

    Args:
        config: as parsed.
        source: the file, for messages.

    Raises:
        ModelError: they do not; names the two that contradict each other.
    """
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{source}: {config.num_heads} attention heads cannot share {config.num_kv_heads} "
            "key and value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{source}: a head of odd width {config.head_dim} cannot be rotated")
    if not 1 <= _stretched_length(config) <= _MAX_CONTEXT_LENGTH:
        raise ModelError(
            f"{source}: a context of {_stretched_length(config):g} tokens, RoPE's factor of "
            f"{config.rope.factor:g} included, is not between 1 and {_MAX_CONTEXT_LENGTH}"
        )
    if not math.isfinite(config.rope.attention_factor):
        raise ModelError(f"{source}: RoPE's attention factor is {config.rope.attention_factor}")
    return config


def _stretched_length(config: ModelConfig) -> float:
    rope = config.rope
    if rope.kind == "linear":
        return config.max_position_embeddings * rope.factor
    if rope.kind == "yarn":
        return rope.original_max_position_embeddings * rope.factor
    return config.max_position_embeddings
