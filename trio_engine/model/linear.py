"""Matrix products in the form that is fastest for a batch's height.

Layer: model. Nothing here changes what is computed, only the order of its sums; what a quantized
matrix makes of its product is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from trio_engine.model.quantization import QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from trio_engine.model.quantization import Matrix

# Measured with torch 2.13 (MKL) on 2 AVX2 cores, float32, weight [3072, 576]: 8 rows take 2.0 ms
# by functional.linear and 0.8 ms as weight @ x.T, 32 rows 3.4 and 2.3 ms; from 128 rows on there
# is nothing to gain. One row reads the weight at 8 GB/s by functional.linear, padded to two rows
# at 11.5; three take longer than four.
_MOST_ROWS = 64
_LEAST_WEIGHT_ELEMENTS = 1 << 18


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Computes ``x @ weight.T + bias``.

    Args:
        x: ``[num_rows, in]``, contiguous.
        weight: ``[out, in]``, of the same device, and of the same type unless quantized.
        bias: ``[out]`` or None.

    Returns:
        ``[num_rows, out]``, contiguous.
    """
    if isinstance(weight, QuantizedMatrix):
        out = weight.multiply(x)
        return out if bias is None else out.add_(bias)
    if not _gains_by_swapping(x, weight):
        return functional.linear(x, weight, bias)
    num_rows = x.shape[0]
    out = torch.mm(weight, _pad_rows(x).t())[:, :num_rows].t().contiguous()
    return out if bias is None else out.add_(bias)


def _gains_by_swapping(x: Tensor, weight: Tensor) -> bool:
    if weight.is_cuda or weight.dtype is not torch.float32:
        return False
    return x.shape[0] <= _MOST_ROWS and weight.numel() >= _LEAST_WEIGHT_ELEMENTS


def _pad_rows(x: Tensor) -> Tensor:
    return torch.cat((x, x[:1])) if x.shape[0] in (1, 3) else x
