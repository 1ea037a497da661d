"""What a load takes: the parameters, and for a moment little more than the tensor at hand."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.model.decoding import NEEDS_INT4

pytestmark = pytest.mark.slow

PROGRAM = """
import os
import torch
import trio_engine.model.load
from tests.benchmarks.figures import peak_rss_bytes
from trio_engine.config import EngineConfig
from trio_engine.executor.torch_executor import TorchExecutor

def peak_bytes():
    # Not ru_maxrss, which begins with the size of the process that started this one.
    return peak_rss_bytes(os.getpid())

before = peak_bytes()
options = {{"dtype": {dtype!r}, "quantization": {quantization!r}}}
executor = TorchExecutor(EngineConfig(model="smollm2", device="cpu", **options))
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
    grown, weights, largest = measure(dtype, None)
    assert grown <= weights + 2 * largest


@pytest.mark.parametrize(
    ("quantization", "share"), [("int8", 0.5), pytest.param("int4", 0.4, marks=NEEDS_INT4)]
)
def test_quantizing_takes_no_more_than_that_and_leaves_less(
    quantization: str, share: float
) -> None:
    """The embedding stays, a fifth of the parameters; a tied head becomes a copy as int8."""
    unquantized = measure("float32", None)
    grown, weights, largest = measure("float32", quantization)
    assert grown <= unquantized.weights + 2 * largest
    assert weights < share * unquantized.weights


class Measured(NamedTuple):
    """Bytes: at the peak beyond what was there before, of all tensors, of the embedding."""

    grown: int
    weights: int
    largest: int


def measure(dtype: str, quantization: str | None) -> Measured:
    program = PROGRAM.format(dtype=dtype, quantization=quantization)
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Measured(*map(int, output.split()))
