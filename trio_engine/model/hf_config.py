"""Parses the configuration of a Hugging Face folder, as transformers 4 or 5 writes it.

Layer: model, without torch. A key that transformers gives a default may be absent and then means
that default; anything else that is absent, and anything we cannot do, is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.errors import ModelError
from trio_engine.model.config import Architecture, ModelConfig, check_config
from trio_engine.model.fields import Fields
from trio_engine.model.hf_rope import parse_rope

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES = ("float32", "bfloat16", "float16")
_MISTRAL_SLIDING_WINDOW = 4096  # what transformers takes where the key is absent, not null
_MAX_LAYERS = 10_000
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_hf_config(folder: Path) -> ModelConfig:
    """Reads ``config.json`` and, if there is one, ``generation_config.json``.

    Raises:
        ModelError: missing, no JSON, or unsupported; names file, key and value.
    """
    generation = folder / "generation_config.json"
    return parse_hf_config(
        folder / "config.json",
        read_json_object(folder / "config.json"),
        read_json_object(generation) if generation.exists() else {},
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file that must hold one JSON object.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: is not a JSON object: {error}") from error


def parse_hf_config(
    source: Path, values: Mapping[str, Any], generation: Mapping[str, Any]
) -> ModelConfig:
    """Makes sense of a configuration.

    Args:
        source: the file, for messages.
        values: of ``config.json``.
        generation: of ``generation_config.json``; its end tokens count besides those of values.

    Raises:
        ModelError: a key is missing, nonsense or unsupported; names file, key and value.
    """
    fields = Fields(source, values)
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    return check_config(_config(fields, architecture, generation), source)


def _config(
    fields: Fields, architecture: Architecture, generation: Mapping[str, Any]
) -> ModelConfig:
    vocab_size = fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    sliding_window, layer_is_sliding = _sliding(fields, architecture, num_layers)
    # Only Llama and Qwen3 have the key; Qwen2 always has a bias on q, k and v and never on o.
    attention_bias = architecture in ("llama", "qwen3") and fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, architecture, num_heads),
        head_dim=_head_dim(fields, architecture, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=parse_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias or architecture == "qwen2",
        attention_out_bias=attention_bias,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "qwen3",
        sliding_window=sliding_window,
        layer_is_sliding=layer_is_sliding,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=_eos_token_ids(fields, generation, vocab_size),
        dtype=_dtype(fields),
    )


def _architecture(fields: Fields) -> Architecture:
    names = fields.raw("architectures")
    if names is None:
        fields.missing("architectures")
    if isinstance(names, list) and len(names) == 1:
        for name, architecture in _ARCHITECTURES.items():
            if names[0] == name:
                return architecture
    fields.fail("architectures", f"unsupported; one of {', '.join(_ARCHITECTURES)} is")


def _refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        fields.fail("hidden_act", "unsupported; only silu is")
    if "quantization_config" in fields:
        fields.fail("quantization_config", "quantized folders are unsupported; use a GGUF file")


def _num_kv_heads(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    # Before grouped attention, Llama's configurations did not have the key.
    default = num_heads if architecture == "llama" else None
    return fields.integer("num_key_value_heads", default)


def _head_dim(fields: Fields, architecture: Architecture, num_heads: int) -> int:
    if architecture == "qwen3" or "head_dim" in fields:
        return fields.integer("head_dim")
    hidden_size = fields.integer("hidden_size")
    if hidden_size % num_heads:
        fields.fail("num_attention_heads", f"does not divide hidden_size = {hidden_size}")
    return hidden_size // num_heads


def _sliding(
    fields: Fields, architecture: Architecture, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    none = (False,) * num_layers
    if architecture == "mistral":
        if fields.has_null("sliding_window"):
            return None, none
        return fields.integer("sliding_window", _MISTRAL_SLIDING_WINDOW), (True,) * num_layers
    if architecture == "llama" or not fields.flag("use_sliding_window", False):
        if _SLIDING in _layer_types(fields, num_layers):
            fields.fail("layer_types", "names sliding layers in a model without sliding window")
        return None, none
    layers = _qwen_sliding_layers(fields, num_layers)
    return (fields.integer("sliding_window"), layers) if any(layers) else (None, none)


def _qwen_sliding_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    if "layer_types" in fields:
        return tuple(kind == _SLIDING for kind in _layer_types(fields, num_layers))
    first = fields.integer("max_window_layers", minimum=0)
    return tuple(layer >= first for layer in range(num_layers))


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    kinds = fields.raw("layer_types")
    if kinds is None:
        return []
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        fields.fail("layer_types", f"is not a list of {num_layers}, one for each layer")
    if not all(kind in (_FULL, _SLIDING) for kind in kinds):
        fields.fail("layer_types", "names an unsupported kind of layer")
    return kinds


def _eos_token_ids(
    fields: Fields, generation: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    more = Fields(fields.source.with_name("generation_config.json"), generation)
    ids = fields.token_ids("eos_token_id", vocab_size) + more.token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))


def _dtype(fields: Fields) -> str:
    key = "dtype" if "dtype" in fields else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        fields.fail(key, f"unsupported; one of {', '.join(_DTYPES)} is")
    return name
