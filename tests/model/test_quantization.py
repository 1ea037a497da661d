"""Quantized matrices: near the ones they were made of, exact in what they multiply with."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.model.decoding import HAS_INT4, NEEDS_INT4, LogitsProbe, load_decoder
from tests.model.test_decoder_logits import reference, token_ids
from tests.model.test_lora import load, save_adapter
from tests.model.test_sleep import SleepingModel
from tests.model.tiny_models import FAMILIES, make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.core.pause import RELEASED_AT
from trio_engine.errors import ConfigError, ModelError
from trio_engine.model.linear import linear
from trio_engine.model.quantization import (
    GROUP_SIZE,
    Int4Matrix,
    Int8Matrix,
    QuantizedMatrix,
    check_can_quantize,
    quantize,
)
from trio_engine.model.weights import WeightForm

if TYPE_CHECKING:
    from pathlib import Path

    from trio_engine.config import QuantizationName
    from trio_engine.model.decoder import Decoder
    from trio_engine.model.matrix import Matrix
    from trio_engine.model.weights import DecoderWeights

QUANTIZATIONS: list[Any] = ["int8", pytest.param("int4", marks=NEEDS_INT4)]
KINDS: list[Any] = [Int8Matrix, pytest.param(Int4Matrix, marks=NEEDS_INT4)]
BFLOAT16_ROUNDING = 2.0**-8
"""At most, of any number, relative to it."""

MAX_LOGIT_ERRORS = {"int8": 0.03, "int4": 0.3}
"""Root mean square over that of the logits, with random weights; measured: 0.02 and 0.24 at most. A
group of 32 then reaches to two standard deviations either way, which makes a step of int4 a quarter
of one; trained weights are kinder."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def all_of(matrix: QuantizedMatrix) -> torch.Tensor:
    return matrix.dequantized(0, matrix.shape[0])


def steps_of(matrix: QuantizedMatrix) -> torch.Tensor:
    """``[out, in]``: what lies between two values that a weight could have."""
    if isinstance(matrix, Int8Matrix):
        return matrix.scales.float()[:, None].expand(matrix.shape)
    assert isinstance(matrix, Int4Matrix)
    return matrix.scales_zeros[..., 0].float().t().repeat_interleave(GROUP_SIZE, dim=1)


WEIGHTS = {
    "random": random(192, 96),
    "large": random(64, 64) * 1e30,
    "small": random(64, 64) * 1e-30,
    "all zero": torch.zeros(64, 32),
    "zero rows among others": random(64, 64) * (torch.arange(64) % 3 > 0)[:, None],
    "all the same": torch.full((64, 64), -0.7),
    "positive and far from zero": random(128, 64) * 0.01 + 5.0,
    "one that stands out": torch.where(torch.arange(64 * 64).view(64, 64) == 70, 300.0, 0.1),
    "more than one slab": random(1024, 576),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_is_off_by_more_than_half_a_step(
    kind: type[Int8Matrix | Int4Matrix], name: str
) -> None:
    weights = WEIGHTS[name]
    matrix = kind.of(weights)
    found = all_of(matrix)
    assert matrix.shape == tuple(weights.shape) == tuple(found.shape)
    # The last part is float32's own, of adding a zero that is far from nothing.
    bound = 0.5 * steps_of(matrix) + 1e-6 * weights.abs()
    assert ((found - weights).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_quantized_already_stays_as_it_is(kind: type[Int8Matrix | Int4Matrix]) -> None:
    """Every level once in a group of int4, so that its range is found again."""
    levels = (torch.arange(64)[:, None] * 7 + torch.arange(64) * 5) % 16 - 8
    weights = levels.float() * 0.25
    matrix = kind.of(weights if kind is Int4Matrix else (levels * 127.0 / 8) * 0.5)
    again = kind.of(all_of(matrix))
    assert torch.equal(all_of(again), all_of(matrix))
    if kind is Int4Matrix:
        assert torch.equal(all_of(matrix), weights)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 24, 25, 128, 129])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_dequantized_matrix(
    kind: type[Int8Matrix | Int4Matrix], num_rows: int
) -> None:
    """By the kernel up to the roundings of bfloat16 in and out, otherwise as float32."""
    matrix = kind.of(random(1024, 576))
    x, weights = random(num_rows, 576, seed=1), all_of(matrix)
    found, expected = matrix.multiply(x), x @ weights.t()
    assert found.is_contiguous()
    assert found.dtype == torch.float32
    if num_rows <= matrix.most_kernel_rows:
        bound = BFLOAT16_ROUNDING * (x.abs() @ weights.abs().t() + expected.abs())
    else:
        bound = torch.full_like(expected, 1e-3)
    assert found.shape == expected.shape
    assert ((found - expected).abs() <= 1.01 * bound).all()


@pytest.mark.parametrize("num_rows", [1, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_layer_gives_the_type_of_its_input_and_adds_its_bias(
    kind: type[Int8Matrix | Int4Matrix], dtype: torch.dtype, num_rows: int
) -> None:
    matrix, bias = kind.of(random(128, 64).to(dtype)), (100 * random(128)).to(dtype)
    x = random(num_rows, 64).to(dtype)
    found = linear(x, matrix, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found, linear(x, matrix) + bias)


@NEEDS_INT4
def test_shapes_that_kernels_cannot_take_fall_back() -> None:
    assert isinstance(quantize(random(128, 64), "int4"), Int4Matrix)
    assert isinstance(quantize(random(128, 64), "int8"), Int8Matrix)
    assert isinstance(quantize(random(96, 64), "int4"), Int8Matrix)
    narrow = random(128, 48)
    assert quantize(narrow, "int4") is narrow
    assert quantize(narrow, "int8") is narrow


def load_tiny(
    folder: Path, family: str, quantization: QuantizationName | None
) -> tuple[Decoder, torch.Tensor]:
    """A tiny model, and its logits in float32 after each of a few tokens."""
    _, model = make_hf_folder(family, folder)
    decoder = load_decoder(ModelFiles("folder", folder), quantization=quantization)
    return decoder, reference(model, token_ids(200))


@pytest.mark.parametrize("chunks", [[200], [1] * 20 + [180], [8] * 25])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_logits_are_near_those_of_the_model(
    quantization: QuantizationName, family: str, chunks: list[int], tmp_path: Path
) -> None:
    decoder, expected = load_tiny(tmp_path, family, quantization)
    probe = LogitsProbe(decoder)
    probe.add(0, token_ids(200))
    error = probe.run(0, chunks) - expected
    relative = float(error.norm() / expected.norm())
    assert 0 < relative < MAX_LOGIT_ERRORS[quantization]


@NEEDS_INT4
@pytest.mark.parametrize("is_tied", [False, True])
def test_all_but_the_embedding_is_quantized_and_the_floats_are_gone(
    is_tied: bool, tmp_path: Path
) -> None:
    folder, _ = make_hf_folder("llama", tmp_path, tie_word_embeddings=is_tied)
    decoder = load_decoder(ModelFiles("folder", folder))
    floats = [weakref.ref(matrix) for matrix in matrices_of(decoder._weights)]
    held = [decoder._weights]
    decoder.release_weights()
    weights = WeightForm(quantization="int4").apply(held.pop())
    *of_layers, head = matrices_of(weights)
    assert all(isinstance(matrix, Int4Matrix) for matrix in of_layers)
    assert isinstance(head, Int8Matrix)
    assert weights.embedding.dtype == torch.float32
    alive = [matrix() for matrix in floats if matrix() is not None]
    assert [id(matrix) for matrix in alive] == ([id(weights.embedding)] if is_tied else [])


def matrices_of(weights: DecoderWeights) -> list[Matrix]:
    """Of all layers, then the head."""
    layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in weights.layers]
    return [*itertools.chain.from_iterable(layers), weights.head]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_after_a_sleep_the_weights_are_quantized_again(
    quantization: QuantizationName, tmp_path: Path
) -> None:
    folder, _ = make_hf_folder("llama", tmp_path)
    model = SleepingModel(folder, quantization=quantization)
    model.add_all()
    expected = model.finish()
    tensors = model.tensors()
    model.fall_asleep(RELEASED_AT[2])
    assert tensors["weights"]() is None
    model.wake_up()
    assert isinstance(model.memory._decoder._weights.layers[1].gate_up, QuantizedMatrix)
    model.add_all()
    assert model.finish() == expected


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_an_adapter_adds_the_same_on_top(quantization: QuantizationName, tmp_path: Path) -> None:
    """As near to the merged model as the quantized model is to its own."""
    decoder, without = load_tiny(tmp_path / "model", "llama", quantization)
    merged = reference(save_adapter(tmp_path / "adapter", "llama"), token_ids(200))
    probe = LogitsProbe(decoder)
    probe.adapters.add(load(tmp_path / "adapter", decoder))
    probe.add(0, token_ids(200), lora_id=1)
    found = probe.run(0, [8] * 25)
    relative = float((found - merged).norm() / merged.norm())
    assert relative < MAX_LOGIT_ERRORS[quantization]
    assert float((merged - without).norm() / merged.norm()) > 2 * MAX_LOGIT_ERRORS[quantization]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_only_the_cpu_multiplies_with_such_weights(quantization: QuantizationName) -> None:
    check_can_quantize(quantization, torch.device("cpu"))
    check_can_quantize(None, torch.device("cuda"))
    with pytest.raises(ConfigError, match=f"quantization '{quantization}' works on device 'cpu'"):
        check_can_quantize(quantization, torch.device("cuda"))


def test_int4_is_refused_by_a_cpu_without_its_instructions_only() -> None:
    if HAS_INT4:
        check_can_quantize("int4", torch.device("cpu"))
    else:
        with pytest.raises(ConfigError, match="needs a CPU with AVX2 or AVX-512"):
            check_can_quantize("int4", torch.device("cpu"))


def test_a_cpu_that_packs_in_an_unknown_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_pairs(levels: torch.Tensor) -> torch.Tensor:
        return (levels[:, ::2] + 16 * levels[:, 1::2]).to(torch.uint8)

    monkeypatch.setattr("trio_engine.model.quantization._pack", in_pairs)
    check_can_quantize("int8", torch.device("cpu"))
    with pytest.raises(ConfigError, match="needs a CPU with AVX2 or AVX-512"):
        check_can_quantize("int4", torch.device("cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_weight_that_is_not_finite_is_an_error(
    quantization: QuantizationName, value: float
) -> None:
    matrix = torch.randn(128, 64)
    matrix[70, 33] = value
    with pytest.raises(ModelError, match="not finite"):
        quantize(matrix, quantization)


def test_a_model_with_such_a_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    folder, _ = make_hf_folder("llama", tmp_path)
    weights = load_decoder(ModelFiles("folder", folder))._weights
    down = weights.layers[1].down
    assert isinstance(down, torch.Tensor)
    down[0, 0] = float("nan")
    with pytest.raises(ModelError, match="cannot quantize down of layer 1: it has weights"):
        WeightForm(quantization="int8").apply(weights)
