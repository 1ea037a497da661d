"""Weights from GGUF files: Hugging Face names and order, exact dequantization, little memory."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch

from tests.model.tiny_models import FAMILIES, make_gguf, make_model
from trio_engine.checkpoint import ModelFiles, locate_model
from trio_engine.errors import ModelError
from trio_engine.gguf_metadata import read_gguf
from trio_engine.model.loader import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, Any]
STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SIMPLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def open_file(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles("gguf", path))


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_an_f32_file_equals_the_original(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(family, **overrides)
    checkpoint = open_file(make_gguf(family, tmp_path / "m.gguf", model))
    expected = dict(model.named_parameters())  # a tied head is not among them
    found = dict(checkpoint.tensors())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[name]), name
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in found.values())


def test_biases_of_permuted_heads_and_rope_factors_are_understood(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = make_model("llama", attention_bias=True, mlp_bias=True, rope_parameters=rope)
    found = dict(open_file(make_gguf("llama", tmp_path / "m.gguf", model)).tensors())
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("quantization", [*STORED, *SIMPLE])
def test_dequantized_weights_equal_the_reference(quantization: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    model = make_model("qwen2")
    path = make_gguf("qwen2", tmp_path / "m.gguf", model, quantization)
    for name, tensor in open_file(path).tensors():
        array = model.state_dict()[name].numpy()
        if array.ndim == 2:
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
            assert tensor.dtype == STORED.get(quantization, torch.float32)
        assert torch.equal(tensor.float(), torch.from_numpy(array)), name


def random_blocks(array: Array, kind: gguf.GGMLQuantizationType) -> Array:
    """Random bytes of a type that cannot be quantized to, whose scales are finite."""
    if kind not in {gguf.GGMLQuantizationType[name] for name in K_TYPES}:
        return gguf.quants.quantize(array, kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (*array.shape[:-1], array.shape[-1] // block_size * block_bytes)
    data = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    blocks = data.reshape(-1, block_bytes)
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.quants.dequantize(blocks, kind)).all(axis=1)
    blocks[~finite] &= 0x3B  # clears the exponent's highest bit, wherever the scales are
    return data


@pytest.mark.parametrize("quantization", K_TYPES)
def test_k_types_equal_the_reference(quantization: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    model = make_model("qwen2", hidden_size=256, intermediate_size=256)
    path = make_gguf("qwen2", tmp_path / "m.gguf", model, quantization, encode=random_blocks)
    for name, tensor in open_file(path).tensors():
        array = model.state_dict()[name].numpy()
        if array.ndim == 2:
            array = gguf.quants.dequantize(random_blocks(array, kind), kind)
        assert torch.equal(tensor, torch.from_numpy(array)), name


def test_a_tensor_of_several_chunks_has_no_seam(tmp_path: Path) -> None:
    model = make_model("qwen2", vocab_size=5003)
    path = make_gguf("qwen2", tmp_path / "m.gguf", model, "Q8_0")
    kind = gguf.GGMLQuantizationType.Q8_0
    array = model.state_dict()["model.embed_tokens.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    found = dict(open_file(path).tensors())["model.embed_tokens.weight"]
    assert torch.equal(found, torch.from_numpy(expected))


def test_a_permuted_weight_that_is_quantized_comes_in_order(tmp_path: Path) -> None:
    model = make_model("llama")
    found = dict(open_file(make_gguf("llama", tmp_path / "m.gguf", model, "Q8_0")).tensors())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=2e-3, rtol=0)


def write_tensors(path: Path, change: Any, *, arch: str = "llama") -> Path:
    """A tiny file whose dict of tensors was changed before it was written."""
    source = read_gguf(make_gguf("llama", path.with_name("source.gguf"), make_model("llama")))
    writer = gguf.GGUFWriter(path, arch)
    for key, value in source.metadata.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif key != "general.architecture":
            writer.add_uint32(key, value)
    tensors: dict[str, Array] = {
        info.name: np.zeros(info.shape, dtype=np.float32) for info in source.tensors
    }
    change(tensors)
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType.IQ4_NL if array.dtype == np.uint8 else None
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("output_norm.weight"), "lacks model.norm.weight, which the configuration"),
        (
            lambda t: t.update({"blk.0.ffn_gate_inp.weight": np.zeros(4, dtype=np.float32)}),
            "has blk.0.ffn_gate_inp.weight, no part of a llama model",
        ),
        (
            lambda t: t.update({"vision.weight": np.zeros(4, dtype=np.float32)}),
            "has vision.weight, no part of a llama model",
        ),
        (
            lambda t: t.update({"blk.1.ffn_up.weight": np.zeros((64, 64), dtype=np.float32)}),
            "model.layers.1.mlp.up_proj.weight has shape [64, 64], but the configuration calls for "
            "[128, 64]",
        ),
        (
            lambda t: t.update({"blk.0.ffn_up.weight": np.zeros((128, 36), dtype=np.uint8)}),
            "tensor blk.0.ffn_up.weight is of type IQ4_NL, unsupported; BF16, F16, F32, Q2_K",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_when_opened(
    change: Any, message: str, tmp_path: Path
) -> None:
    path = write_tensors(tmp_path / "m.gguf", change)
    with pytest.raises(ModelError) as caught:
        open_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "m.gguf", lambda _: None, arch="mamba")
    with pytest.raises(ModelError, match=r"general.architecture = 'mamba': unsupported"):
        open_file(path)


@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
def test_a_truncated_file_is_refused_before_and_after_opening(
    quantization: str, tmp_path: Path
) -> None:
    path = make_gguf("llama", tmp_path / "m.gguf", make_model("llama"), quantization)
    checkpoint = open_file(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=f"^{path}: truncated: it ends within a tensor"):
        list(checkpoint.tensors())
    with pytest.raises(ModelError, match=f"^{path}: truncated GGUF file: "):
        open_file(path)


@pytest.mark.slow
def test_smollm2_equals_what_transformers_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would be left behind
    files = locate_model("smollm2")
    checkpoint = open_checkpoint(files)
    # What from_pretrained(gguf_file=...) calls; that takes a minute, most of it for reading the
    # header three times and making this table for every module.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    with torch.device("meta"):
        config = transformers.LlamaConfig(num_hidden_layers=checkpoint.config.num_layers)
        model = transformers.LlamaForCausalLM(config)
    expected = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        files.path, return_tensors=True, model_to_load=model
    )
    num_tensors = 0
    for name, tensor in checkpoint.tensors():
        assert torch.equal(tensor, expected["tensors"][name]), name
        num_tensors += 1
    assert num_tensors == len(expected["tensors"]) == 272


@pytest.mark.slow
def test_iterating_smollm2_takes_little_more_than_its_largest_tensor() -> None:
    program = """
import os
from tests.benchmarks.figures import peak_rss_bytes
from trio_engine.checkpoint import locate_model
from trio_engine.model.loader import open_checkpoint
checkpoint = open_checkpoint(locate_model("smollm2"))
before = peak_rss_bytes(os.getpid())  # ru_maxrss would begin with that of this one's parent
largest = 0
for _, tensor in checkpoint.tensors():
    largest = max(largest, tensor.nbytes)
    del tensor
print((peak_rss_bytes(os.getpid()) - before) / largest)
"""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert float(child.stdout) < 1.25
