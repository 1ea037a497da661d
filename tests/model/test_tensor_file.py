"""Reading tensors from a file that does not cooperate; the rest is tested through the loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trio_engine.errors import ModelError
from trio_engine.model.tensor_file import TensorFile


def test_a_tensor_is_read_from_its_offset_and_is_the_callers(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes([9, 9, 0, 60, 0, 64]))
    with TensorFile(path) as file:
        first, again = (file.tensor(2, (2, 1), torch.float16) for _ in range(2))
    first.zero_()
    assert again.tolist() == [[1.0], [2.0]]


def test_a_file_that_cannot_be_opened_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"^{tmp_path}: cannot be read: Is a directory"):
        TensorFile(tmp_path)
    unreadable = Path("/proc/self/mem")  # page 0 is never mapped
    with (
        TensorFile(unreadable) as file,
        pytest.raises(ModelError, match=r"^/proc/self/mem: cannot be read: Input/output error"),
    ):
        file.tensor(0, (1,), torch.float32)
