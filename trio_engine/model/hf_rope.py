"""Parses rotary embeddings of a Hugging Face configuration, in both spellings.

Layer: model, without torch. transformers 4 has ``rope_theta`` and ``rope_scaling``, 5 has both in
``rope_parameters``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trio_engine.model.config import RopeConfig
from trio_engine.model.fields import Fields

if TYPE_CHECKING:
    from typing import Any

_DEFAULT_THETA = 10000.0  # transformers', for the first Llama's configurations have none


def parse_rope(fields: Fields) -> RopeConfig:
    """Reads the rotary embedding of ``config.json``.

    Raises:
        ModelError: of an unsupported kind, or a value is missing or nonsense.
    """
    key = "rope_scaling" if fields.raw("rope_scaling") else "rope_parameters"
    rope = Fields(fields.source, _flat(fields, key), prefix=f"{key}.")
    for place in (rope, fields):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            place.fail("partial_rotary_factor", "unsupported; only whole heads are rotated")
    theta = rope.number("rope_theta", fields.number("rope_theta", _DEFAULT_THETA))
    kind_key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.text(kind_key, "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=rope.number("factor"))
    if kind == "llama3":
        return _llama3(rope, theta, _original_length(fields, rope))
    if kind == "yarn":
        return _yarn(rope, theta, _original_length(fields, rope))
    rope.fail(kind_key, "unsupported; default, linear, llama3 and yarn are")


def _flat(fields: Fields, key: str) -> dict[str, Any]:
    """The sub-object with each key prefixed, as ``Fields`` looks it up."""
    value = fields.raw(key) or {}
    if not isinstance(value, dict):
        fields.fail(key, "is not an object")
    if any(isinstance(item, dict) for item in value.values()):
        fields.fail(key, "unsupported: differs between layers")
    return {f"{key}.{name}": item for name, item in value.items()}


def _original_length(fields: Fields, rope: Fields) -> int:
    key = "original_max_position_embeddings"
    return fields.integer(key, rope.integer(key, fields.integer("max_position_embeddings")))


def _llama3(rope: Fields, theta: float, original_length: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        rope.fail("low_freq_factor", f"is not below high_freq_factor = {high}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original_length,
    )


def _yarn(rope: Fields, theta: float, original_length: int) -> RopeConfig:
    factor = rope.number("factor")
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original_length,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    if "attention_factor" in rope:
        return rope.number("attention_factor")
    if "mscale" in rope and "mscale_all_dim" in rope:
        return yarn_mscale(factor, rope.number("mscale")) / yarn_mscale(
            factor, rope.number("mscale_all_dim")
        )
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature for a stretched context, on cos and sin."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
