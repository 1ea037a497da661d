"""Products come out the same in whichever form they are computed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trio_engine.model.linear import linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 33, 64, 65])
@pytest.mark.parametrize("shape", [(5, 3), (512, 512), (1010, 512), (2048, 512), (1024, 1024)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_equals_torchs(num_rows: int, shape: tuple[int, int], has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if has_bias else None
    found = linear(x, weight, bias)
    assert found.is_contiguous()
    torch.testing.assert_close(found, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_half_types_take_torchs_way() -> None:
    x, weight = torch.ones(2, 512).bfloat16(), torch.ones(1024, 512).bfloat16()
    assert torch.equal(linear(x, weight), functional.linear(x, weight))
