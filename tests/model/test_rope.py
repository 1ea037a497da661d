"""Frequencies of every kind against transformers, and the rotation itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trio_engine.model.config import RopeConfig
from trio_engine.model.rope import RotaryEmbedding, inverse_frequencies, rotate_

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {"factor": 3.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"factor": 4.0}),
        ("yarn", {"factor": 4.0, "truncate": False}),
        ("yarn", {"factor": 40.0, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("yarn", {"factor": 2.0, "beta_fast": 5000.0, "beta_slow": 4000.0}),  # a ramp of no width
    ],
)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_equal_those_of_transformers(
    kind: str, options: dict[str, Any], theta: float
) -> None:
    options = {"theta": theta, "original_max_position_embeddings": 2048} | options
    ours = RopeConfig(kind=kind, **options)  # type: ignore[arg-type]
    parameters = {"rope_type": kind, "rope_theta": options.pop("theta"), **options}
    theirs = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=8192,
        rope_parameters=parameters,
    )
    expected, _ = ROPE_INIT_FUNCTIONS[kind](theirs, CPU)
    assert torch.equal(inverse_frequencies(ours, 64), expected)


def test_factors_divide_the_plain_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(), 4)
    assert plain.tolist() == pytest.approx([1.0, 0.01])
    stretched = inverse_frequencies(RopeConfig(kind="factors", freq_factors=(1.0, 8.0)), 4)
    assert stretched.tolist() == pytest.approx([1.0, 0.00125])


def test_a_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    rope = RotaryEmbedding(RopeConfig(theta=100.0), 16, CPU, torch.float32)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 16, generator=generator).expand(2, 5, 1, 16).clone()
    unrotated = query.clone()
    rotate_(query, rope.rotation(torch.arange(5) + 3))
    rotate_(key, rope.rotation(torch.arange(5)))
    torch.testing.assert_close(query.norm(dim=-1), unrotated.norm(dim=-1))
    scores = (query * key).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand(5, 1), rtol=1e-4, atol=1e-4)


def test_the_attention_factor_scales_both_parts() -> None:
    plain = RotaryEmbedding(RopeConfig(), 8, CPU, torch.float32).rotation(torch.arange(3))
    config = RopeConfig(kind="linear", factor=1.0, attention_factor=2.0)
    scaled = RotaryEmbedding(config, 8, CPU, torch.float32).rotation(torch.arange(3))
    assert torch.equal(scaled.cos, plain.cos * 2)
    assert torch.equal(scaled.sin, plain.sin * 2)
