"""Logits of the decoder against transformers, for every family and variant it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.model.decoding import LogitsProbe, load_decoder
from tests.model.tiny_models import FAMILIES, make_gguf, make_hf_folder, make_model
from trio_engine.checkpoint import ModelFiles
from trio_engine.errors import ModelError
from trio_engine.model.loader import open_checkpoint
from trio_engine.model.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from trio_engine.model.decoder import Decoder

NUM_TOKENS = 70
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-window-of-blocks": ("mistral", {"sliding_window": 8}),
    "mistral-yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-half-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
}


def token_ids(num_tokens: int = NUM_TOKENS, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (num_tokens,), generator=generator).tolist()


@torch.inference_mode()
def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert expected.std() > 0.3, "logits so small would agree whatever was computed"
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance


def decoder_of(folder: Path) -> Decoder:
    return load_decoder(ModelFiles("folder", folder))


def check_all_ways(decoder: Decoder, model: Any, tolerance: float = 1e-4) -> None:
    """Whole prefill, chunks, and token by token: each through shuffled blocks of its own."""
    tokens = token_ids()
    expected = reference(model, tokens)
    for chunks in ([NUM_TOKENS], [7, 32, 1, 30], [21] + [1] * (NUM_TOKENS - 21)):
        probe = LogitsProbe(decoder)
        probe.add(0, tokens)
        assert_close(probe.run(0, chunks), expected, tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder, model = make_hf_folder(family, tmp_path, **overrides)
    check_all_ways(decoder_of(folder), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_from_two_shards(family: str, tmp_path: Path) -> None:
    folder, model = make_hf_folder(family, tmp_path, shards=2)
    probe = LogitsProbe(decoder_of(folder))
    probe.add(0, token_ids())
    assert_close(probe.run(0, [NUM_TOKENS]), reference(model, token_ids()))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
        ("llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_logits_from_a_gguf_file(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(family, **overrides)
    path = make_gguf(family, tmp_path / "model.gguf", model)
    check_all_ways(load_decoder(ModelFiles("gguf", path)), model)


def test_a_mixed_batch_gives_each_row_its_own_logits(tmp_path: Path) -> None:
    """Prefill, chunk and decode in one forward pass, at different lengths, with a window."""
    folder, model = make_hf_folder("mistral", tmp_path, sliding_window=9)
    probe = LogitsProbe(decoder_of(folder))
    sequences = {slot: token_ids(50 + slot, seed=slot) for slot in range(4)}
    expected = {slot: reference(model, tokens) for slot, tokens in sequences.items()}
    found: dict[int, list[torch.Tensor]] = {slot: [] for slot in sequences}
    for slot, tokens in sequences.items():
        probe.add(slot, tokens)
    for counts in ({2: 37, 0: 5}, {0: 1, 2: 1, 1: 20}, {3: 53, 1: 31, 0: 1, 2: 1}, {0: 43, 2: 13}):
        for slot, logits in probe.compute(counts).items():
            found[slot].append(logits)
    for slot, parts in found.items():
        assert_close(torch.cat(parts), expected[slot][: sum(map(len, parts))])


def test_padding_in_large_batches_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and chunks as they are cut under byte budgets of a few blocks."""
    monkeypatch.setattr("trio_engine.model.attention_layout._CPU_GATHER_BYTES", 20_000)
    monkeypatch.setattr("trio_engine.model.attention_layout._MASK_BYTES", 2_000)
    folder, model = make_hf_folder("llama", tmp_path)
    probe = LogitsProbe(decoder_of(folder), max_num_seqs=12)
    sequences = [token_ids(5 + 6 * slot, seed=slot) for slot in range(12)]
    for slot, tokens in enumerate(sequences):
        probe.add(slot, tokens)
        probe.run(slot, [2, len(tokens) - 3])
    for slot, logits in probe.compute(dict.fromkeys(range(12), 1)).items():
        assert_close(logits[-1], reference(model, sequences[slot])[-1])


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.2), ("float16", 0.02)])
def test_half_types_stay_close(dtype: str, tolerance: float, tmp_path: Path) -> None:
    folder, model = make_hf_folder("qwen3", tmp_path)
    decoder = load_decoder(ModelFiles("folder", folder), getattr(torch, dtype))
    probe = LogitsProbe(decoder)
    probe.add(0, token_ids())
    found = probe.run(0, [30, 1, 39])
    assert found.dtype == torch.float32
    assert_close(found, reference(model, token_ids()), tolerance)


def test_tensors_that_do_not_belong_are_named(tmp_path: Path) -> None:
    folder, _ = make_hf_folder("llama", tmp_path)
    checkpoint = open_checkpoint(ModelFiles("folder", folder))
    tensors = dict(checkpoint.tensors())

    def load(changes: dict[str, torch.Tensor | None]) -> None:
        changed = {name: t for name, t in (tensors | changes).items() if t is not None}
        load_weights(checkpoint.config, changed.items(), torch.float32, torch.device("cpu"))

    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ModelError, match=f"missing, among them {name}"):
        load({name: None})
    with pytest.raises(ModelError, match=rf"{name}: shape \[3, 64\], expected \[32, 64\]"):
        load({name: torch.zeros(3, 64)})
    with pytest.raises(ModelError, match="tensor extra: not known"):
        load({"extra": torch.zeros(1)})


def test_progress_rises_to_one(tmp_path: Path) -> None:
    folder, _ = make_hf_folder("llama", tmp_path)
    checkpoint = open_checkpoint(ModelFiles("folder", folder))
    shares: list[float] = []
    cpu = torch.device("cpu")
    load_weights(checkpoint.config, checkpoint.tensors(), torch.float32, cpu, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
