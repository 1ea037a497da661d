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

# Measured with torch 2.13 and MKL on 2 AVX2 cores; of other libraries it is not known. float32, all
# matrices of a model of 135 million parameters in turn. Of 8 rows functional.linear takes 145 ms,
# weight @ x.T 61; from 128 rows on there is nothing to gain, and three rows take longer than four.
# One row: 64 ms by functional.linear on one core, 49 as weight @ x.T padded to two rows, and 33 in
# pieces, where the same threads take 29 to add up the weights.
_MOST_ROWS = 64
_LEAST_WEIGHT_ELEMENTS = 1 << 18
# A thread computes whole pieces. Enough of them for many threads, and 4 to 64 make no difference.
_NUM_PIECES = 64


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
    if x.shape[0] == 1 and weight.shape[0] % _NUM_PIECES == 0:
        out = _multiply_row(x, weight)
    else:
        out = torch.mm(weight, _pad_rows(x).t())[:, : x.shape[0]].t().contiguous()
    return out if bias is None else out.add_(bias)


def _multiply_row(x: Tensor, weight: Tensor) -> Tensor:
    """MKL shares out a batch of products to threads, but not one product of a single row."""
    pieces = weight.view(_NUM_PIECES, -1, x.shape[1])
    return torch.bmm(pieces, x.t().expand(_NUM_PIECES, -1, -1)).view(1, -1)


def _gains_by_swapping(x: Tensor, weight: Tensor) -> bool:
    if weight.is_cuda or weight.dtype is not torch.float32:
        return False
    return x.shape[0] <= _MOST_ROWS and weight.numel() >= _LEAST_WEIGHT_ELEMENTS


def _pad_rows(x: Tensor) -> Tensor:
    return torch.cat((x, x[:1])) if x.shape[0] in (1, 3) else x
