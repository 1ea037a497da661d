"""Reads tensor data from a file into memory of its own.

Layer: model. By reads, not by a mapping: mapped pages would count as the engine's memory, and a
file cut short under a mapping kills the process where a read gives an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self


class TensorFile:
    """An open file of tensors. A context manager; closing leaves what was read untouched."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Reads a fresh contiguous CPU tensor stored as ``dtype`` from byte ``offset``.

        Raises:
            ModelError: the file ends before it, or cannot be read.
        """
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into(offset, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills a buffer of bytes from byte ``offset``.

        Raises:
            ModelError: the file ends before it, or cannot be read.
        """
        try:
            self._file.seek(offset)
            # One read gives at most 2 GiB, however large the buffer.
            while buffer:
                num_bytes = self._file.readinto(buffer)
                if not num_bytes:
                    raise ModelError(f"{self.path}: truncated: it ends within a tensor")
                buffer = buffer[num_bytes:]
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror or error}") from error
