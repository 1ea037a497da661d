"""Loads weights from a Hugging Face folder: one safetensors file, or shards with an index.

Layer: model. The ``safetensors`` package checks each file's header; data is read by our own reads
(see ``tensor_file``), for the package hands out views of a mapping.
"""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from trio_engine.errors import ModelError
from trio_engine.model.expected_tensors import check_tensors, is_superfluous
from trio_engine.model.hf_config import read_hf_config, read_json_object
from trio_engine.model.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_engine.model.config import ModelConfig

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class _Entry(msgspec.Struct, frozen=True):
    """A tensor of a safetensors file; ``data_offsets`` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Shard(msgspec.Struct, frozen=True):
    """One file: where its data starts, and its tensors by name, in the order of their data."""

    path: Path
    data_start: int
    entries: dict[str, _Entry]


class SafetensorsCheckpoint:
    """A Hugging Face folder as a ``Checkpoint``.

    Raises:
        ModelError: missing, damaged or unsupported; names the file and what is wrong with it.
    """

    def __init__(self, folder: Path) -> None:
        self.config: ModelConfig = read_hf_config(folder)
        self._shards = [_read_shard(path, self.config) for path in _shard_paths(folder)]
        found: dict[str, tuple[int, ...]] = {}
        for shard in self._shards:
            if repeated := shard.entries.keys() & found:
                raise ModelError(f"{shard.path}: {min(repeated)} is in another shard too")
            found.update((name, entry.shape) for name, entry in shard.entries.items())
        check_tensors(folder, self.config, found)

    @property
    def num_bytes(self) -> int:
        entries = (entry for shard in self._shards for entry in shard.entries.values())
        return sum(entry.data_offsets[1] - entry.data_offsets[0] for entry in entries)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Checkpoint.tensors``."""
        for shard in self._shards:
            with TensorFile(shard.path) as file:
                for name, entry in shard.entries.items():
                    start = shard.data_start + entry.data_offsets[0]
                    yield name, file.tensor(start, entry.shape, _DTYPES[entry.dtype])


def _shard_paths(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.exists():
        raise ModelError(f"{folder}: has neither {_SINGLE} nor {_INDEX}")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or no object")
    for name in weight_map.values():
        # A name with a separator could reach any file of this machine.
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: weight_map names {name!r}, no safetensors file beside it")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _read_shard(path: Path, config: ModelConfig) -> _Shard:
    _validate(path)
    data_start, entries = _read_header(path)
    needed = {name: entry for name, entry in entries.items() if not is_superfluous(name, config)}
    for name, entry in needed.items():
        if entry.dtype not in _DTYPES:
            raise ModelError(
                f"{path}: {name} is of type {entry.dtype}, unsupported; {', '.join(_DTYPES)} are"
            )
    by_place = sorted(needed.items(), key=lambda item: item[1].data_offsets)
    return _Shard(path, data_start, dict(by_place))


def _validate(path: Path) -> None:
    """Lets the package check lengths, offsets and overlaps; afterwards they can be trusted."""
    if not os.path.isfile(path):  # Path.is_file raises where the name is too long for a file
        raise ModelError(f"{path}: is missing")
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: damaged or truncated: {error}") from error


def _read_header(path: Path) -> tuple[int, dict[str, _Entry]]:
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        data = file.read(num_bytes)
    try:
        header = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except msgspec.DecodeError as error:  # the package also takes an entry written as an array
        raise ModelError(f"{path}: header: {error}") from error
    return 8 + num_bytes, entries
