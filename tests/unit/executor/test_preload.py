"""Torch's main library is mapped before torch, and the import takes it from there."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from trio_engine.executor import preload

if TYPE_CHECKING:
    import pytest

IMPORT = """
import sys
from pathlib import Path
from trio_engine.executor.preload import preload_torch

def is_mapped():
    return "libtorch_cpu" in Path("/proc/self/maps").read_text()

assert not is_mapped()
assert preload_torch()
assert is_mapped()
assert "torch" not in sys.modules
import torch
assert torch.ones(2).sum().item() == 2.0
"""


def test_the_import_finds_it_mapped() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


def test_torch_without_that_library_is_left_to_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "_LIBRARY", "libtorch_other.so")
    assert not preload.preload_torch()


def test_no_torch_is_left_to_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not preload.preload_torch()
