"""Which tensors a configuration calls for, by Hugging Face name.

Layer: model, without torch. Both loaders check a file's header against it, so that a checkpoint
that cannot work is refused in milliseconds and by file name, before any memory is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from trio_engine.model.config import ModelConfig

Shape = tuple[int, ...]

_NAMED_AT_MOST = 3


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the decoder and its shape, linear weights as ``[out, in]``."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    layer = dict(_layer_shapes(config))
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": layer[name] for name in layer})
    return shapes


def is_superfluous(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is known and not needed, so that finding it is no error."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    # Checkpoints of the first Llama's time saved this buffer; it follows from the configuration.
    return name.endswith(".self_attn.rotary_emb.inv_freq")


def check_tensors(source: Path, config: ModelConfig, found: Mapping[str, Shape]) -> None:
    """Compares what a checkpoint has with what its configuration calls for.

    Args:
        source: the file or folder, for messages.
        config: the configuration.
        found: every tensor and its shape, superfluous ones left out.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape; names it.
    """
    expected = expected_shapes(config)
    if missing := [name for name in expected if name not in found]:
        raise ModelError(f"{source}: lacks {_some(missing)}, which the configuration calls for")
    if unknown := [name for name in found if name not in expected]:
        raise ModelError(
            f"{source}: has {_some(unknown)}, no part of a {config.architecture} model"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(
                f"{source}: {name} has shape {list(found[name])}, but the configuration calls for "
                f"{list(shape)}"
            )


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, num_out, num_in, bias in (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.attention_out_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        yield f"{name}.weight", (num_out, num_in)
        if bias:
            yield f"{name}.bias", (num_out,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
