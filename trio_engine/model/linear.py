"""A linear layer, and float32 matrices in the forms that CPUs multiply fastest.

Layer: model. Nothing here changes what is computed, only the order of its sums. Which form is the
fastest one is for ``linear_backend`` to find out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from trio_engine.model.matrix import StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from trio_engine.model.matrix import Matrix

# Measured with MKL on 2 AVX2 cores of AMD, the matrices of a model of 135 million parameters in
# turn: from 128 rows on there is nothing to gain by swapping, and three rows take longer than four.
_MOST_SWAPPED_ROWS = 64
# A thread computes whole pieces. Enough of them for many threads, and 4 to 64 make no difference.
_NUM_PIECES = 64
# MKL arranges a matrix for a number of rows, and multiplies any with it. Measured on 2 AVX-512
# cores of Intel, in ms for the same model, packed for 8, 32 and 256 rows: one row 30, 29, 30; eight
# rows 36, 36, 36; 32 rows 107, 74, 71; 256 rows 485, 309, 242.
_PACKED_FOR_ROWS = 256


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Computes ``x @ weight.T + bias``.

    Args:
        x: ``[num_rows, in]``, contiguous.
        weight: ``[out, in]``, of the same device; of the same type unless quantized.
        bias: ``[out]`` or None.

    Returns:
        ``[num_rows, out]``, contiguous.
    """
    if not isinstance(weight, StoredMatrix):
        return functional.linear(x, weight, bias)
    out = weight.multiply(x)
    return out if bias is None else out.add_(bias)


@dataclass(frozen=True, eq=False)
class SwappedMatrix(StoredMatrix):
    """A float32 matrix that few rows are multiplied with as ``matrix @ x.T``.

    Attributes:
        values: ``[out, in]``.
    """

    # What it is for, by torch 2.13 on the AVX2 cores: of 8 rows functional.linear takes 145 ms,
    # this 61. One row: 64 ms by functional.linear on one core, 49 as matrix @ x.T padded to two
    # rows, and 33 in pieces, where the same threads take 29 to add up the weights.
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows > _MOST_SWAPPED_ROWS:
            return functional.linear(x, self.values)
        if num_rows == 1 and self.shape[0] % _NUM_PIECES == 0:
            return self._multiply_row(x)
        padded = torch.cat((x, x[:1])) if num_rows in (1, 3) else x
        return torch.mm(self.values, padded.t())[:, :num_rows].t().contiguous()

    def _multiply_row(self, x: Tensor) -> Tensor:
        """MKL shares out a batch of products to threads, but not one product of a single row."""
        pieces = self.values.view(_NUM_PIECES, -1, x.shape[1])
        return torch.bmm(pieces, x.t().expand(_NUM_PIECES, -1, -1)).view(1, -1)


class PackedMatrix(StoredMatrix):
    """A float32 matrix in the order in which MKL's kernels read it.

    Otherwise MKL copies a matrix into that order for every product of more than a few rows. There
    is no way back to the values, and the packed form cannot be copied.

    Args:
        matrix: ``[out, in]`` float32 on CPU; not kept.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(matrix, _PACKED_FOR_ROWS)
        # The operator takes shape and type from the matrix itself; one element has to do for it.
        self._like = matrix.new_zeros(1).expand(matrix.shape)

    @property
    def shape(self) -> tuple[int, int]:
        return self._like.shape[0], self._like.shape[1]

    @property
    def nbytes(self) -> int:
        return self._like.numel() * self._like.itemsize

    def multiply(self, x: Tensor) -> Tensor:
        # The operator would not use what is packed for another number of rows than it is told.
        product: Tensor = torch.ops.mkl._mkl_linear(x, self._packed, self._like, None, x.shape[0])
        return product


@torch.inference_mode()
def can_pack() -> bool:
    """Whether this torch has MKL's packed matrices, and MKL multiplies any number of rows by one.

    It does everywhere, as far as is known, but neither of the two promises it.
    """
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(512, 512, generator=generator)
    try:
        packed = PackedMatrix(matrix)
        return all(_is_right(packed, matrix, num_rows) for num_rows in (1, 8, 300))
    except (AttributeError, RuntimeError):  # no such operator, or not with these arguments
        return False


def _is_right(packed: PackedMatrix, matrix: Tensor, num_rows: int) -> bool:
    x = matrix[:num_rows] + 1
    return torch.allclose(packed.multiply(x), functional.linear(x, matrix), atol=1e-3)
