"""One safetensors file: its header, checked, and its tensors.

Layer: model. The ``safetensors`` package checks the header; data is read by our own reads (see
``tensor_file``), for the package hands out views of a mapping.
"""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from trio_engine.errors import ModelError
from trio_engine.model.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of a safetensors file; ``data_offsets`` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """A file whose header fits its data.

    Args:
        path: of the file.
        wanted: tensors of other names may be of any type, and are left out.

    Attributes:
        path: as given.
        entries: its tensors by name, in the order of their data.

    Raises:
        ModelError: missing, damaged, truncated, or a tensor of an unsupported type.
    """

    def __init__(self, path: Path, wanted: Callable[[str], bool] = lambda _name: True) -> None:
        _validate(path)
        self.path = path
        self._data_start, entries = _read_header(path)
        needed = {name: entry for name, entry in entries.items() if wanted(name)}
        for name, entry in needed.items():
            if entry.dtype not in _DTYPES:
                raise ModelError(
                    f"{path}: {name} is of type {entry.dtype}, unsupported; {', '.join(_DTYPES)}"
                    " are"
                )
        self.entries = dict(sorted(needed.items(), key=lambda item: item[1].data_offsets))

    @property
    def num_bytes(self) -> int:
        """Of the tensors' data."""
        return sum(end - start for start, end in (e.data_offsets for e in self.entries.values()))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads the tensors one after the other, each into memory of its own."""
        with TensorFile(self.path) as file:
            for name, entry in self.entries.items():
                start = self._data_start + entry.data_offsets[0]
                yield name, file.tensor(start, entry.shape, _DTYPES[entry.dtype])


def _validate(path: Path) -> None:
    """Lets the package check lengths, offsets and overlaps; afterwards they can be trusted."""
    if not os.path.isfile(path):  # Path.is_file raises where the name is too long for a file
        raise ModelError(f"{path}: is missing")
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: damaged or truncated: {error}") from error


def _read_header(path: Path) -> tuple[int, dict[str, TensorEntry]]:
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        data = file.read(num_bytes)
    try:
        header = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=TensorEntry) for name, raw in header.items()}
    except msgspec.DecodeError as error:  # the package also takes an entry written as an array
        raise ModelError(f"{path}: header: {error}") from error
    return 8 + num_bytes, entries
