"""Rotary position embedding: frequencies by kind, and the rotation itself.

Layer: model. The formulas and their float32 rounding are transformers' (``modeling_rope_utils``):
at position 8,000 a more exact angle would already differ from what models were trained with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trio_engine.model.config import RopeConfig


class Rotation(NamedTuple):
    """Cosines and sines of one batch, ``[num_tokens, 1, head_dim]`` each.

    The first half of ``sin`` is negated, so that a rotation is two products and a sum.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """Rotates queries and keys by their positions, in Hugging Face's half layout.

    Angles are computed for each batch: 60 microseconds for 256 tokens, where a table of 131,072
    positions would hold 64 MiB.

    Args:
        config: kind and constants.
        head_dim: even.
        device: of the batches.
        dtype: of queries and keys.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._frequencies = inverse_frequencies(config, head_dim).to(device)
        self._scale = config.attention_factor
        self._dtype = dtype

    def rotation(self, positions: Tensor) -> Rotation:
        """Cosines and sines at ``positions`` ``[num_tokens]``."""
        angles = positions[:, None, None].float() * self._frequencies
        cos = (angles.cos() * self._scale).to(self._dtype)
        sin = (angles.sin() * self._scale).to(self._dtype)
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotate_(heads: Tensor, rotation: Rotation) -> None:
    """Rotates ``heads`` ``[num_tokens, num_heads, head_dim]`` in place."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(rotation.cos).addcmul_(swapped, rotation.sin)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, ``[head_dim / 2]`` float32, fastest first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods = config.theta**exponents
    plain = 1.0 / periods
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "factors":
        return plain / torch.tensor(config.freq_factors, dtype=torch.float32)
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, periods, head_dim)
    return plain


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Stretches long waves by ``factor``, keeps short ones, blends those between."""
    context = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    longest_kept = context / config.high_freq_factor
    shortest_stretched = context / config.low_freq_factor
    stretched = torch.where(wavelengths > shortest_stretched, plain / config.factor, plain)
    share = (context / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - share) * stretched / config.factor + share * stretched
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blended, stretched)


def _yarn(config: RopeConfig, periods: Tensor, head_dim: int) -> Tensor:
    """Blends from kept to stretched along a ramp between two numbers of rotations."""
    low = _dimension_of(config.beta_fast, config, head_dim)
    high = _dimension_of(config.beta_slow, config, head_dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _dimension_of(num_rotations: float, config: RopeConfig, head_dim: int) -> float:
    """The dimension that turns ``num_rotations`` times over the original context."""
    context = config.original_max_position_embeddings
    turns = math.log(context / (num_rotations * 2 * math.pi))
    return head_dim * turns / (2 * math.log(config.theta))
