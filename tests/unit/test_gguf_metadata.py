"""The GGUF header reader: what it reads, and that any bytes either parse or raise ModelError."""

from __future__ import annotations

import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from trio_engine.checkpoint import locate_model
from trio_engine.errors import ModelError
from trio_engine.gguf_metadata import TensorInfo, read_gguf, read_gguf_metadata

if TYPE_CHECKING:
    from pathlib import Path

HUGE = 1 << 62
SCALARS: list[tuple[int, str, int | float | bool]] = [
    (0, "B", 200),
    (1, "b", -100),
    (2, "H", 60000),
    (3, "h", -30000),
    (4, "I", 4_000_000_000),
    (5, "i", -2_000_000_000),
    (6, "f", 0.5),
    (7, "?", True),
    (10, "Q", 1 << 63),
    (11, "q", -(1 << 62)),
    (12, "d", 1e-300),
]


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def string_array(items: list[str]) -> bytes:
    return struct.pack("<IQ", 8, len(items)) + b"".join(map(string, items))


def tensor(name: str, shape: tuple[int, ...], ggml_type: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + dimensions + struct.pack("<IQ", ggml_type, offset)


def header(entries: list[bytes], tensors: list[bytes] | None = None, version: int = 3) -> bytes:
    tensors = tensors or []
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    return start + b"".join(entries) + b"".join(tensors)


def whole_file() -> bytes:
    """A valid file with every kind of field and two tensors."""
    entries = [entry(f"scalar.{t}", t, struct.pack(f"<{f}", v)) for t, f, v in SCALARS]
    entries.append(entry("text", 8, string("grüß")))
    entries.append(entry("texts", 9, string_array(["a", "", "bc"])))
    entries.append(entry("numbers", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 1)))
    tensors = [tensor("first", (2, 32), 8), tensor("second", (3,), 0, offset=96)]
    head = header(entries, tensors)
    return head + bytes(-len(head) % 32 + 96 + 12)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_bytes(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write_bytes


def test_every_type_of_value_is_read(write: Any) -> None:
    metadata = read_gguf_metadata(write(whole_file()))
    for value_type, _, value in SCALARS:
        assert metadata[f"scalar.{value_type}"] == value
        assert type(metadata[f"scalar.{value_type}"]) is type(value)
    assert metadata["text"] == "grüß"
    assert metadata["texts"] == ["a", "", "bc"]
    assert metadata["numbers"] == [-1, 0, 1]


def test_tensors_are_placed_after_the_aligned_header(write: Any) -> None:
    path = write(whole_file())
    size = path.stat().st_size
    file = read_gguf(path)
    assert file.path == path
    assert file.tensors == [
        TensorInfo("first", (2, 32), 8, size - 108, 68),
        TensorInfo("second", (3,), 0, size - 12, 12),
    ]


def test_alignment_is_taken_from_the_metadata(write: Any) -> None:
    entries = [entry("general.alignment", 4, struct.pack("<I", 128))]
    head = header(entries, [tensor("t", (4,))], version=2)
    file = read_gguf(write(head + bytes(-len(head) % 128 + 16)))
    assert file.tensors[0].offset == 128


def test_a_file_of_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(["a", "b", "ç"])
    writer.add_token_scores([0.5, 1.5, -2.0])
    writer.add_add_bos_token(False)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "model.gguf")
    assert file.metadata == {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": ["a", "b", "ç"],
        "tokenizer.ggml.scores": [0.5, 1.5, -2.0],
        "tokenizer.ggml.add_bos_token": False,
    }
    (info,) = file.tensors
    data = (tmp_path / "model.gguf").read_bytes()[info.offset : info.offset + info.num_bytes]
    assert info.shape == (2, 3)
    assert np.frombuffer(data, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_smollm2_reads_as_the_gguf_package_reads_it() -> None:
    path = locate_model("smollm2").path
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == fields
    assert [(t.name, t.offset, t.num_bytes, t.ggml_type) for t in file.tensors] == [
        (t.name, t.data_offset, t.n_bytes, t.tensor_type) for t in reader.tensors
    ]


ENTRY_KEY = header([b""]) + string("k")
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated GGUF file: it ends within its first bytes"),
    "magic": (b"PK\3\4" + bytes(40), "is not a GGUF file: it starts with b'PK"),
    "version 1": (header([], version=1), "GGUF version 1, supported are 2 and 3"),
    "big-endian": (header([], version=3 << 24), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "in the number of tensors"),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "in the number of metadata keys"),
    "keys missing": (b"GGUF" + struct.pack("<IQQ", 3, 0, 9), "ends within a metadata key"),
    "empty key": (header([entry("", 0, b"\0")]), "empty or repeated metadata key ''"),
    "repeated key": (header([entry("k", 0, b"\0")] * 2), "empty or repeated metadata key 'k'"),
    "key not UTF-8": (header([string(b"\xff") + bytes(9)]), "a metadata key is not UTF-8"),
    "unknown type": (header([entry("k", 99, b"")]), "'k' has unknown type 99"),
    "string length": (ENTRY_KEY + struct.pack("<IQ", 8, HUGE), "a length of 46116"),
    "string end": (ENTRY_KEY + struct.pack("<IQ", 8, 1000), "it ends within 'k'"),
    "string not UTF-8": (header([entry("k", 8, string(b"\xfe"))]), "'k' is not UTF-8: b'\\xfe'"),
    "array length": (ENTRY_KEY + struct.pack("<IIQ", 9, 5, HUGE), "a length of 46116"),
    "array end": (ENTRY_KEY + struct.pack("<IIQ", 9, 5, 1 << 22), "it ends within 'k'"),
    "strings end": (ENTRY_KEY + struct.pack("<IIQ", 9, 8, 1 << 22), "it ends within 'k'"),
    "strings item": (ENTRY_KEY + struct.pack("<IIQQ", 9, 8, 1, HUGE), "it ends within 'k'"),
    "strings not UTF-8": (
        ENTRY_KEY + struct.pack("<IIQ", 9, 8, 1) + string(b"\xc3"),
        "an item of 'k' is not UTF-8: b'\\xc3'",
    ),
    "nested array": (ENTRY_KEY + struct.pack("<IIQ", 9, 9, 1), "'k' is an array of unknown type 9"),
    "alignment": (
        header([entry("general.alignment", 4, struct.pack("<I", 48))]),
        "general.alignment is 48, not a power of two",
    ),
    "alignment text": (
        header([entry("general.alignment", 8, string("32"))]),
        "general.alignment is '32', not a power of two",
    ),
    "tensor name": (header([], [tensor("t", (1,))] * 2), "two tensors have the same name"),
    "dimensions": (header([], [tensor("t", (1,) * 5)]), "in dimensions of tensor 't'"),
    "no dimensions": (header([], [tensor("t", ())]), "'t' of shape () cannot be of type 0"),
    "zero dimension": (header([], [tensor("t", (4, 0))]), "'t' of shape (4, 0) cannot"),
    "part of a block": (header([], [tensor("t", (33,), 8)]), "'t' of shape (33,) cannot be of"),
    "tensor type": (header([], [tensor("t", (1,), 4)]), "tensor 't' has unknown type 4"),
    "tensor size": (header([], [tensor("t", (HUGE, HUGE))]), "truncated GGUF file"),
    "tensor offset": (header([], [tensor("t", (1,), 0, HUGE)]), "truncated GGUF file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_file_is_named_with_what_is_wrong(write: Any, name: str) -> None:
    data, message = WRONG[name]
    path = write(data)
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match=f"^{path}: cannot be read: "):
            read_gguf_metadata(path)


def test_a_lying_header_allocates_nothing_of_note(write: Any) -> None:
    path = write(ENTRY_KEY + struct.pack("<IIQ", 9, 8, 1 << 22) + bytes(4096))
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="truncated"):
            read_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_every_prefix_of_a_file_is_called_truncated(write: Any) -> None:
    data = whole_file()
    for length in range(len(data)):
        with pytest.raises(ModelError, match="truncated GGUF file"):
            read_gguf(write(data[:length]))


def parses_or_raises_model_error(path: Path) -> None:
    try:
        tensors = read_gguf(path).tensors
        message = str(path)
    except ModelError as error:
        tensors = []
        message = str(error)
    assert message.startswith(str(path))
    size = path.stat().st_size
    assert all(0 <= t.offset <= t.offset + t.num_bytes <= size for t in tensors)


@given(data=st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_parse_or_raise_model_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + data)
    parses_or_raises_model_error(path)


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(whole_file()) - 1), st.binary(min_size=1, max_size=8)),
        max_size=4,
    )
)
@settings(deadline=None)
def test_a_file_with_bytes_overwritten_parses_or_raises_model_error(
    edits: list[tuple[int, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(whole_file())
    for position, new in edits:
        data[position : position + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "edited.gguf"
    path.write_bytes(data)
    parses_or_raises_model_error(path)
