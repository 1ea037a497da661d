"""What a load takes: the parameters, and for a moment little more than the tensor at hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import resource
import torch
import trio_engine.model.load
from trio_engine.config import EngineConfig
from trio_engine.executor.torch_executor import TorchExecutor

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak_bytes()
executor = TorchExecutor(EngineConfig(model="smollm2", device="cpu", dtype={dtype!r}))
properties = executor.load()
weights = executor._runner._decoder._weights
tensors = {{id(tensor): tensor for layer in weights.layers for tensor in
    (getattr(layer, name) for name in layer.__slots__) if tensor is not None}}
tensors |= {{id(t): t for t in (weights.embedding, weights.final_norm, weights.head)}}
print(peak_bytes() - before, sum(t.nbytes for t in tensors.values()), weights.embedding.numel() * 4)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_the_weights_and_two_of_the_largest_tensor(dtype: str) -> None:
    """A GiB of KV cache is there too, but not resident."""
    command = [sys.executable, "-c", PROGRAM.format(dtype=dtype)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    grown, weights, largest = map(int, output.split())
    assert grown <= weights + 2 * largest
