"""Loads weights from a Hugging Face folder: one safetensors file, or shards with an index.

Layer: model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.errors import ModelError
from trio_engine.model.expected_tensors import check_tensors, is_superfluous
from trio_engine.model.hf_config import read_hf_config, read_json_object
from trio_engine.model.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from trio_engine.model.config import ModelConfig

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """A Hugging Face folder as a ``Checkpoint``.

    Raises:
        ModelError: missing, damaged or unsupported; names the file and what is wrong with it.
    """

    def __init__(self, folder: Path) -> None:
        self.config: ModelConfig = read_hf_config(folder)
        self._shards = [
            SafetensorsFile(path, lambda name: not is_superfluous(name, self.config))
            for path in _shard_paths(folder)
        ]
        found: dict[str, tuple[int, ...]] = {}
        for shard in self._shards:
            if repeated := shard.entries.keys() & found:
                raise ModelError(f"{shard.path}: {min(repeated)} is in another shard too")
            found.update((name, entry.shape) for name, entry in shard.entries.items())
        check_tensors(folder, self.config, found)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self._shards)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Checkpoint.tensors``."""
        for shard in self._shards:
            yield from shard.tensors()


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
