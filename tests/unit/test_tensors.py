"""Tensors as bytes: no copy, no torch, nothing that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trio_engine.errors import ProtocolError
from trio_engine.tensors import ITEM_SIZE_BYTES, TensorData


def test_the_buffer_is_not_copied() -> None:
    buffer = bytearray(b"\x01\x00\x02\x00")
    tensor = TensorData("int16", [2], buffer)
    buffer[0] = 7
    assert tensor.to_numpy().tolist() == [7, 2]
    assert (tensor.dtype, tensor.shape, bytes(tensor.data)) == ("int16", (2,), bytes(buffer))


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZE_BYTES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_every_dtype_and_shape_gives_an_array_of_that_shape(
    dtype: str, shape: tuple[int, ...]
) -> None:
    size = ITEM_SIZE_BYTES[dtype] * int(np.prod(shape, dtype=int))
    array = TensorData(dtype, shape, bytes(size)).to_numpy()
    assert array.shape == shape
    assert array.dtype == ("float32" if dtype == "bfloat16" else dtype)
    assert not array.any()


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZE_BYTES.keys() - {"bfloat16"}))
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_an_array_comes_back_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = TensorData.from_numpy(array).to_numpy()
    assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())


def test_a_contiguous_array_is_wrapped_and_others_are_copied_in_c_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    wrapped = TensorData.from_numpy(array)
    turned = TensorData.from_numpy(array.T)
    array[0, 0] = 9
    assert wrapped.to_numpy().tolist() == [[9, 1, 2], [3, 4, 5]]
    assert turned.to_numpy().tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_big_endian_array_becomes_little_endian() -> None:
    tensor = TensorData.from_numpy(np.array([1, 256], dtype=">i4"))
    assert bytes(tensor.data) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert tensor.dtype == "int32"


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    bits = np.array([1.0, -2.5, 0.0, np.inf], dtype="<f4").view("<u4") >> 16
    tensor = TensorData("bfloat16", (2, 2), bits.astype("<u2").tobytes())
    assert tensor.to_numpy().tolist() == [[1.0, -2.5], [0.0, np.inf]]


@pytest.mark.parametrize("buffer", [b"\x01\x02", bytearray(b"\x01\x02")])
def test_a_view_is_read_only_whatever_the_buffer_is(buffer: bytes | bytearray) -> None:
    array = TensorData("uint8", (2,), buffer).to_numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 5


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "message"),
    [
        ("float8", (1,), b"\0", "unknown tensor dtype 'float8'"),
        ("int8", (2, -1), b"", r"negative size in tensor shape \[2, -1\]"),
        ("int32", (2,), bytes(7), r"int32\[2\] needs 8 bytes, got 7"),
        ("int32", (2,), bytes(9), r"int32\[2\] needs 8 bytes, got 9"),
        ("int32", (0,), b"\0", r"int32\[0\] needs 0 bytes, got 1"),
        ("int32", (), b"", r"int32\[\] needs 4 bytes, got 0"),
    ],
)
def test_what_does_not_fit_is_the_peer_s_fault(
    dtype: str, shape: tuple[int, ...], data: bytes, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        TensorData(dtype, shape, data)


def test_a_memoryview_of_wider_items_is_measured_in_bytes() -> None:
    view = np.arange(3, dtype=np.int16).data
    assert TensorData("int16", (3,), view).to_numpy().tolist() == [0, 1, 2]


def test_equal_means_dtype_shape_and_bytes() -> None:
    tensor = TensorData("int16", (2,), b"\1\0\2\0")
    assert tensor == TensorData("int16", [2], bytearray(b"\1\0\2\0"))
    others: list[Any] = [
        TensorData("uint16", (2,), b"\1\0\2\0"),
        TensorData("int16", (1, 2), b"\1\0\2\0"),
        TensorData("int16", (2,), b"\1\0\3\0"),
        "tensor",
    ]
    for other in others:
        assert tensor != other


def test_a_tensor_is_no_key_as_its_buffer_may_be_anyone_s() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(TensorData("int8", (), b"\0"))


def test_repr_shows_no_content() -> None:
    assert repr(TensorData("int16", (2, 3), bytes(12))) == "TensorData('int16', [2, 3], 12 bytes)"
