"""A tensor as bytes: what crosses the wire without torch on either side.

Pure. numpy has no bfloat16, so a dtype is torch's name for it and a view as numpy is asked for.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from trio_engine.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ITEM_SIZE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}


class TensorData:
    """A dense C-ordered little-endian tensor over a buffer that is not copied.

    Args:
        dtype: torch's name without its module, one of ``ITEM_SIZE_BYTES``.
        shape: sizes, all of them >= 0; ``()`` for a scalar.
        data: exactly the bytes of the elements. Must not change while this object lives.

    Raises:
        ProtocolError: unknown dtype, negative size, or a buffer of another length.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(
        self, dtype: str, shape: Sequence[int], data: bytes | bytearray | memoryview
    ) -> None:
        item_size = ITEM_SIZE_BYTES.get(dtype)
        if item_size is None:
            raise ProtocolError(f"unknown tensor dtype {dtype!r}")
        if any(size < 0 for size in shape):
            raise ProtocolError(f"negative size in tensor shape {list(shape)}")
        self.dtype = dtype
        self.shape = tuple(shape)
        self.data = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if self.data.nbytes != item_size * prod(self.shape):
            raise ProtocolError(
                f"tensor of {dtype}{list(shape)} needs {item_size * prod(self.shape)} bytes,"
                f" got {self.data.nbytes}"
            )

    @classmethod
    def from_numpy(cls, array: NDArray[np.generic]) -> TensorData:
        """Wraps an array; copies only what is not C-ordered and little-endian."""
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(array.dtype.name, array.shape, little.reshape(-1).view(np.uint8).data)

    def to_numpy(self) -> NDArray[np.generic]:
        """A read-only view of the buffer; bfloat16 becomes a float32 copy."""
        if self.dtype == "bfloat16":
            bits = np.frombuffer(self.data, dtype="<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        view = np.frombuffer(self.data.toreadonly(), dtype=np.dtype(self.dtype).newbyteorder("<"))
        return view.reshape(self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return (self.dtype, self.shape) == (other.dtype, other.shape) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorData({self.dtype!r}, {list(self.shape)}, {self.data.nbytes} bytes)"
