"""Products come out the same in whichever form they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from trio_engine.model.linear import PackedMatrix, SwappedMatrix, can_pack, linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.model.matrix import Matrix

# Not by can_pack, which would hide its own fault.
HAS_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
NEEDS_MKL = pytest.mark.skipif(not HAS_MKL, reason="needs a torch with MKL")
FORMS = [SwappedMatrix, pytest.param(PackedMatrix, marks=NEEDS_MKL)]
SHAPES = [(5, 3), (512, 512), (1010, 512), (2048, 512), (1024, 1024), (576, 1536)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", [*range(10), 16, 33, 64, 65, 255, 256, 257, 600])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_it_equals_torchs(
    form: Callable[[torch.Tensor], Matrix], shape: tuple[int, int], num_rows: int
) -> None:
    x, values = random(num_rows, shape[1], seed=1), random(*shape)
    matrix = form(values)
    assert tuple(matrix.shape) == shape
    assert matrix.nbytes == values.nbytes
    for bias in (None, random(shape[0], seed=2)):
        found = linear(x, matrix, bias)
        assert found.is_contiguous()
        torch.testing.assert_close(found, functional.linear(x, values, bias), rtol=1e-4, atol=1e-4)


def test_every_torch_with_mkl_can_pack() -> None:
    assert can_pack() is HAS_MKL


@NEEDS_MKL
def test_a_packed_matrix_keeps_no_hold_on_the_values() -> None:
    values = random(512, 512)
    matrix, x = PackedMatrix(values), random(8, 512, seed=1)
    expected = matrix.multiply(x)
    values.zero_()
    assert torch.equal(matrix.multiply(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_multiplied_with_as_torch_does(dtype: torch.dtype) -> None:
    x, weight, bias = torch.ones(2, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype), None
    assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
