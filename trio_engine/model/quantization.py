"""Matrices of a decoder as small integers, which torch's CPU kernels multiply with.

Layer: model. Only weights are quantized, to the nearest value, without any data to calibrate by.
Kernels take activations as bfloat16 and give products as bfloat16, which is the type for which
torch has fast ones; sums inside them are float32.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from trio_engine.errors import ConfigError, ModelError
from trio_engine.model.matrix import StoredMatrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from trio_engine.config import QuantizationName
    from trio_engine.model.matrix import Matrix

GROUP_SIZE = 32
"""Weights of a row that share a scale as int4. With 64 a product of one row takes 4% less time, but
weights whose file has groups of 32 are torn: perplexity rises by 49% instead of 1%."""

# A float32 slab of a MB stays in the second-level cache between its making and its use.
_SLAB_ELEMENTS = 1 << 18
# The int8 kernel reads beyond rows that are no whole number of vectors, of 8 floats with AVX2 and
# of 16 with AVX-512; int4 has groups of 32 anyway.
_IN_MULTIPLE = 32
# Rows that one piece of the packed int4 layout interleaves, at most.
_OUT_MULTIPLE = 64
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
_INT8_MAX = 127
_INT4_ZERO = 8
_INT4_MAX = 15
# Half a step is the error of every weight only as long as bfloat16 can place the levels of a group
# that well: 128 steps from zero it no longer can.
_MOST_STEPS_FROM_ZERO = 100


class QuantizedMatrix(StoredMatrix):
    """A matrix ``[out, in]`` that is not kept as floats.

    Attributes:
        most_kernel_rows: rows of a product up to which torch's kernel is the faster way. Its time
            is that of its rows, one by one; what a slab costs to make is shared by all of them.
    """

    most_kernel_rows: ClassVar[int]

    @abstractmethod
    def dequantized(self, first: int, last: int) -> Tensor:
        """Rows ``first`` to before ``last`` as they count, float32; multiples of 64."""

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """``x @ self.T`` by torch's kernel, all in bfloat16."""

    @abstractmethod
    def _multiply_slab(self, first: int, last: int, columns: Tensor, out: Tensor) -> None:
        """``self[first:last] @ columns`` into ``out``, all in float32."""

    def multiply(self, x: Tensor) -> Tensor:
        """Computes ``x @ self.T``, for ``x`` of any float type.

        Few rows are rounded to bfloat16 on the way in and out; many are computed in float32.
        """
        if x.shape[0] <= self.most_kernel_rows:
            return self._product(x.bfloat16()).to(x.dtype)
        num_out = self.shape[0]
        columns = x.float().t()
        out = columns.new_empty(num_out, x.shape[0])
        for first, last in _slabs(self.shape):
            self._multiply_slab(first, last, columns, out[first:last])
        return out.t().contiguous().to(x.dtype)


@dataclass(frozen=True, eq=False)
class Int8Matrix(QuantizedMatrix):
    """Weights from -127 to 127 times their row's scale.

    Attributes:
        values: ``[out, in]`` int8.
        scales: ``[out]`` bfloat16.
    """

    # Measured with torch 2.13 on 2 AVX2 cores, the layers of a model of 135 million parameters in
    # turn, medians: the kernel takes 0.43 of the slabs' time at 8 rows, 0.57 at 16, 0.71 at 24.
    # With the head, whole steps of 32 rows are faster by slabs: 0.74 of float32's speed, not 0.68.
    most_kernel_rows = 24

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Int8Matrix:
        """The nearest one to ``[out, in]`` of floats; no weight is off by over half its scale."""
        largest = torch.maximum(matrix.amax(1), -matrix.amin(1)).float()
        scales = _usable((largest / _INT8_MAX).bfloat16())
        values = torch.empty(matrix.shape, dtype=torch.int8)
        for first, last in _slabs((matrix.shape[0], matrix.shape[1])):
            rows = matrix[first:last].float() / scales[first:last, None]
            values[first:last] = rows.round_()
        return cls(values, scales)

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantized(self, first: int, last: int) -> Tensor:
        return self.values[first:last].float().mul_(self.scales[first:last, None])

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.values, self.scales)
        return product

    def _multiply_slab(self, first: int, last: int, columns: Tensor, out: Tensor) -> None:
        torch.mm(self.values[first:last].float(), columns, out=out)
        out.mul_(self.scales[first:last, None])  # fewer numbers than the slab


@dataclass(frozen=True, eq=False)
class Int4Matrix(QuantizedMatrix):
    """Weights from 0 to 15: ``(weight - 8) * scale + zero``, these two of their group.

    Attributes:
        packed: ``[out, in / 2]`` uint8, in the order of torch's kernel.
        scales_zeros: ``[in / 32, out, 2]`` bfloat16.
        half_piece: ``packed`` is ``[out / n, in, half_piece]`` pieces of ``n = 2 * half_piece``
            rows; the low four bits are of the first half of the rows, the high ones of the second.
    """

    # Measured in the same way: 0.46 of the slabs' time at 32 rows, 0.77 at 64, 0.99 at 128. Slabs
    # take longer to make than those of int8: four bits are parted and put in order first.
    most_kernel_rows = 128

    packed: Tensor
    scales_zeros: Tensor
    half_piece: int

    @classmethod
    def of(cls, matrix: Tensor) -> Int4Matrix:
        """A near one to ``[out, in]`` of floats; no weight is off by more than half its scale.

        Raises:
            ConfigError: the kernel of this machine packs weights in an order of its own.
        """
        num_out, num_in = matrix.shape
        packed = torch.empty(num_out, num_in // 2, dtype=torch.uint8)
        shape = (num_in // GROUP_SIZE, num_out, 2)
        scales_zeros = torch.empty(shape, dtype=torch.bfloat16)
        for first, last in _slabs((num_out, num_in)):
            groups = matrix[first:last].float().view(last - first, -1, GROUP_SIZE)
            scales, zeros = _levels_of(groups)
            levels = ((groups - zeros[..., None]) / scales[..., None]).round_().add_(_INT4_ZERO)
            levels = levels.clamp_(0, _INT4_MAX).to(torch.int32).view(last - first, num_in)
            packed[first:last] = _pack(levels)
            scales_zeros[:, first:last] = torch.stack([scales.t(), zeros.t()], dim=2)
        return cls(packed, scales_zeros, _half_piece())

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_zeros.nbytes

    def dequantized(self, first: int, last: int) -> Tensor:
        num_in, half = self.shape[1], self.half_piece
        pieces = self.packed[first:last].view(-1, num_in, half).transpose(1, 2).contiguous()
        levels = torch.stack([pieces & _INT4_MAX, pieces >> 4], dim=1).float()
        groups = levels.view(last - first, -1, GROUP_SIZE)
        scales, zeros = self.scales_zeros[:, first:last].float().permute(2, 1, 0).contiguous()
        lowest = torch.sub(zeros, scales, alpha=_INT4_ZERO)
        return groups.mul_(scales[..., None]).add_(lowest[..., None]).view(-1, num_in)

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, GROUP_SIZE, self.scales_zeros
        )
        return product

    def _multiply_slab(self, first: int, last: int, columns: Tensor, out: Tensor) -> None:
        torch.mm(self.dequantized(first, last), columns, out=out)


def quantize(matrix: Tensor, quantization: QuantizationName) -> Matrix:
    """Quantizes a matrix ``[out, in]``, if its shape allows it.

    Returns:
        For int4 an ``Int8Matrix`` if ``out`` is no multiple of 64; the matrix itself if ``in`` is
        no multiple of 32.

    Raises:
        ConfigError: see ``Int4Matrix.of``.
        ModelError: a weight is NaN or infinite, or for int4 near the end of float32.
    """
    num_out, num_in = matrix.shape
    if num_in % _IN_MULTIPLE:
        return matrix
    if quantization == "int8" or num_out % _OUT_MULTIPLE:
        return Int8Matrix.of(matrix)
    return Int4Matrix.of(matrix)


def check_can_quantize(quantization: QuantizationName | None, device: torch.device) -> None:
    """Tells before a load what could not work after it.

    Raises:
        ConfigError: weights cannot be multiplied in this form on this device.
    """
    if quantization is None:
        return
    if device.type != "cpu":
        raise ConfigError(
            f"quantization {quantization!r} works on device 'cpu' only, not on {device.type!r}"
        )
    if quantization == "int4":
        _half_piece()


def _slabs(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """First and last row of slabs in whole 64s, but for the end."""
    num_out, num_in = shape
    step = max(_OUT_MULTIPLE, _SLAB_ELEMENTS // num_in // _OUT_MULTIPLE * _OUT_MULTIPLE)
    for first in range(0, num_out, step):
        yield first, min(first + step, num_out)


def _levels_of(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero ``[num_rows, num_groups]`` bfloat16 of each group."""
    low, high = groups.amin(-1), groups.amax(-1)
    farthest = torch.maximum(high, -low)
    steps = torch.maximum((high - low) / _INT4_MAX, farthest / _MOST_STEPS_FROM_ZERO)
    scales = _usable(steps.bfloat16())
    return scales, torch.add(low, scales.float(), alpha=_INT4_ZERO).bfloat16()


def _usable(scales: Tensor) -> Tensor:
    """Of weights that are all zero, or as good as that, any scale will do but none."""
    if not scales.isfinite().all():
        raise ModelError("it has weights that are not finite, or too large")
    return torch.where(scales < _SMALLEST_SCALE, 1.0, scales)


def _pack(levels: Tensor) -> Tensor:
    # The last argument is of another device's layout.
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    return packed


def _half_piece() -> int:
    """Finds the packed order by packing rows of known numbers: it is the instruction set's."""
    sixteenths = torch.arange(_OUT_MULTIPLE, dtype=torch.int32) // 16
    packed = _pack(sixteenths[:, None].repeat(1, GROUP_SIZE))
    second = int(packed.view(-1)[0]) >> 4
    if second not in (1, 2):
        raise ConfigError("quantization 'int4' needs a CPU with AVX2 or AVX-512")
    return second * 16
