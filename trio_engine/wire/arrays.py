"""Tensors and numpy arrays inside a message: ``[dtype, shape, data]``, large data out of line.

Pure. The two classes are the hooks of one msgspec encoder or decoder. Their errors are TypeError
and ValueError, to which msgspec adds the path of the field; ``codec`` translates.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trio_engine.errors import ProtocolError
from trio_engine.tensors import ITEM_SIZE_BYTES, TensorData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trio_engine.wire.messages import Buffer

ZERO_COPY_THRESHOLD_BYTES = 256
"""From this size on, data travels in a frame of its own. A receiver accepts both at any size."""

RAW_VIEW_EXT = 3
"""Extension type of inline data. 1 and 2 are pickle and cloudpickle, which nobody may send us."""

MAX_DIMENSIONS = 32
"""numpy's own limit before 2.0, and a bound on the work that a hostile shape can cause."""

MAX_ARRAY_BYTES = 1 << 46
"""More than any address space in use, and far from overflow: catches absurd shapes of size 0."""

_KINDS_AND_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}

# A closed table instead of np.dtype(text): that parser also takes objects, records and strings.
NDARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    f"{order}{kind}{size}": np.dtype(f"{order}{kind}{size}")
    for kind, sizes in _KINDS_AND_SIZES.items()
    for size in sizes
    for order in ("|" if size == 1 else "<>")
}


class ArrayWriter:
    """Encodes the arrays of one message at a time and collects its aux frames in field order.

    Args:
        give_up_arrays: the sender never changes an array once it is in a message, so aux frames
            are marked read-only, by which transport knows that it need not copy them.
    """

    def __init__(self, *, give_up_arrays: bool) -> None:
        self._give_up_arrays = give_up_arrays
        self._frames: list[memoryview] = []

    def take_frames(self) -> list[memoryview]:
        """The aux frames since the last call."""
        frames, self._frames = self._frames, []
        return frames

    def enc_hook(self, value: Any) -> Any:
        """What msgspec encodes in place of ``value``."""
        if isinstance(value, TensorData):
            return [value.dtype, value.shape, self._place(value.data)]
        if isinstance(value, np.ndarray):
            return self._write_ndarray(value)
        raise TypeError(f"{type(value).__name__} has no wire form")

    def _write_ndarray(self, array: NDArray[Any]) -> list[Any]:
        dtype = array.dtype.str
        if dtype not in NDARRAY_DTYPES:
            raise TypeError(f"numpy array of {array.dtype} has no wire form")
        flat = np.ascontiguousarray(array).reshape(-1)
        return [dtype, array.shape, self._place(flat.view(np.uint8).data)]

    def _place(self, data: memoryview) -> msgspec.msgpack.Ext | int:
        if data.nbytes < ZERO_COPY_THRESHOLD_BYTES:
            return msgspec.msgpack.Ext(RAW_VIEW_EXT, data)
        self._frames.append(data.toreadonly() if self._give_up_arrays else data)
        return len(self._frames)


class ArrayReader:
    """Decodes arrays as views of the message that they came in.

    Attributes:
        frames: aux frames of the message being decoded.
    """

    def __init__(self) -> None:
        self.frames: Sequence[Buffer] = ()

    def dec_hook(self, wanted: Any, value: Any) -> Any:
        """The ``TensorData`` or ndarray that ``value`` spells."""
        match value:
            case [str(dtype), list(shape), data]:
                view = self._find(data)
            case _:
                raise ValueError("expected [dtype, shape, data]")
        read = _read_tensor if wanted is TensorData else _read_ndarray
        return read(dtype, shape, view)

    def _find(self, data: Any) -> memoryview:
        if isinstance(data, memoryview):  # only ext_hook makes these
            return data
        if isinstance(data, dict):
            raise ValueError("tensors in shared memory are not accepted")
        if type(data) is not int:
            raise ValueError(f"array data is neither inline nor a frame, but {type(data).__name__}")
        if not 1 <= data <= len(self.frames):
            raise ValueError(f"frame {data} is absent, the message has {len(self.frames)} of them")
        return memoryview(self.frames[data - 1])


def ext_hook(code: int, data: memoryview) -> memoryview:
    """The bytes of an inline array; every other extension type is refused.

    Raises:
        ValueError: pickled data or an unknown extension type.
    """
    if code in (1, 2):
        raise ValueError("pickled data is never accepted")
    if code != RAW_VIEW_EXT:
        raise ValueError(f"unknown extension type {code}")
    return data


def _read_tensor(dtype: str, shape: list[Any], view: memoryview) -> TensorData:
    _check_shape(shape, ITEM_SIZE_BYTES.get(dtype, 1))
    try:
        return TensorData(dtype, shape, view)
    except ProtocolError as error:
        raise ValueError(str(error)) from None


def _read_ndarray(text: str, shape: list[Any], view: memoryview) -> NDArray[Any]:
    dtype = NDARRAY_DTYPES.get(text)
    if dtype is None:
        raise ValueError(f"numpy dtype {text[:40]!r} is not accepted")
    num_bytes = _check_shape(shape, dtype.itemsize)
    if view.nbytes != num_bytes:
        raise ValueError(f"array of {text}{shape} needs {num_bytes} bytes, got {view.nbytes}")
    return np.frombuffer(view, dtype=dtype).reshape(shape)


def _check_shape(shape: list[Any], item_size: int) -> int:
    """Bytes that an array of this shape has."""
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"array of {len(shape)} dimensions, at most {MAX_DIMENSIONS} are accepted")
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"size {size!r} in an array's shape")
    if item_size * prod(size or 1 for size in shape) > MAX_ARRAY_BYTES:
        raise ValueError(f"absurd array shape {shape}")
    num_bytes: int = item_size * prod(shape)
    return num_bytes
