"""Which form of float32 matrices a CPU multiplies with fastest: measured, unless it is named.

Layer: model. The best of several ways depends on the machine. A row through a model of 135 million
parameters takes 64 ms by torch's linear layers on one machine and 33 ms with swapped matrices; on
another it takes 23 and 41.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

import torch

from trio_engine.errors import ConfigError
from trio_engine.model.device import dtype_name, return_freed_memory
from trio_engine.model.linear import PackedMatrix, SwappedMatrix, can_pack, linear

if TYPE_CHECKING:
    from torch import Tensor

    from trio_engine.config import EngineConfig, LinearBackendName
    from trio_engine.model.config import ModelConfig
    from trio_engine.model.matrix import Matrix

# A smaller matrix stays in the caches, where no form gains much.
_LEAST_ELEMENTS = 1 << 18
# A step reads all of a model, so what is measured must not stay in a cache either: in a cache of
# 260 MB that others used as well, 24 MB had another form win than 128 and 256, and 64 had either
# win. 128 take a third of a second on 2 cores.
_SAMPLE_BYTES = 128 << 20
# A layer for each form, so that none finds in a cache what another one has just read.
_LEAST_LAYERS = 3
# Rows: a request that decodes alone, a few that do, and a prompt.
_HEIGHTS = (1, 8, 64)
# Turns of each layer. With ten layers a median is of 20 turns.
_NUM_ROUNDS = 2
# What two measurements of the same may differ by: the simplest form stays unless one gains more.
_LEAST_GAIN = 1.05


def check_linear_backend(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Tells before a load what could not work after it.

    Raises:
        ConfigError: the backend is not for such weights, or this machine does not have it.
    """
    name = config.linear_backend
    if name in ("auto", "torch"):
        return
    if config.quantization is not None:
        kept = f"quantization {config.quantization!r}"
    elif device.type != "cpu" or dtype is not torch.float32:
        kept = f"{dtype_name(dtype)} on {device.type!r}"
    elif name == "mkl" and not can_pack():
        raise ConfigError(
            "linear_backend 'mkl': this torch cannot multiply by MKL's packed matrices"
        )
    else:
        return
    raise ConfigError(f"linear_backend {name!r} needs float32 weights on 'cpu', not {kept}")


def choose_linear_backend(
    name: LinearBackendName, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> LinearBackendName:
    """Resolves ``auto``: what is the fastest for matrices of these shapes, here and now.

    Args:
        name: checked.
        model: whose matrices they are.
        device: where they will be.
        dtype: of which they will be.

    Returns:
        Not ``auto``.
    """
    if name != "auto":
        return name
    if device.type != "cpu" or dtype is not torch.float32:
        return "torch"
    sample = _sample(model)
    if not sample:
        return "torch"
    names: list[LinearBackendName] = ["torch", "swapped"]
    if can_pack():
        names.append("mkl")
    forms: dict[LinearBackendName, list[list[Matrix]]] = {
        name: [[in_form_of(name, matrix) for matrix in layer] for layer in sample] for name in names
    }
    best = _fastest(forms)
    del forms, sample
    return_freed_memory(device)
    return best


def in_form_of(name: LinearBackendName, matrix: Tensor) -> Matrix:
    """A matrix ``[out, in]`` as a backend multiplies with it; small ones stay as they are."""
    if name == "torch" or matrix.numel() < _LEAST_ELEMENTS:
        return matrix
    return PackedMatrix(matrix) if name == "mkl" else SwappedMatrix(matrix)


def _sample(model: ModelConfig) -> list[list[Tensor]]:
    """Layers of matrices of the model's shapes: very large ones cut, small ones left out."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    queries = model.num_heads * model.head_dim
    qkv = queries + 2 * model.num_kv_heads * model.head_dim
    shapes = ((qkv, hidden), (hidden, queries), (2 * intermediate, hidden), (hidden, intermediate))
    cut = [(min(rows, _SAMPLE_BYTES // 64 // size + 1), size) for rows, size in shapes]
    kept = [shape for shape in cut if math.prod(shape) >= _LEAST_ELEMENTS]
    if not kept:
        return []
    wanted = _SAMPLE_BYTES // (4 * sum(map(math.prod, kept))) + 1
    num_layers = max(_LEAST_LAYERS, min(model.num_layers, wanted))
    return [[torch.full(shape, 0.01) for shape in kept] for _ in range(num_layers)]


@torch.inference_mode()
def _fastest(forms: dict[LinearBackendName, list[list[Matrix]]]) -> LinearBackendName:
    """That with the least time over torch's, in the geometric mean over heights."""
    slowness = dict.fromkeys(forms, 1.0)
    for height in _HEIGHTS:
        for name, ratio in _slowness(forms, height).items():
            slowness[name] *= ratio ** (1 / len(_HEIGHTS))
    best = min(slowness, key=slowness.__getitem__)
    return best if slowness[best] * _LEAST_GAIN < 1 else "torch"


def _slowness(
    forms: dict[LinearBackendName, list[list[Matrix]]], height: int
) -> dict[LinearBackendName, float]:
    """Medians of times over torch's in the same turn, all of which what else goes on slows down."""
    num_layers, names = len(forms["torch"]), list(forms)
    ratios: dict[LinearBackendName, list[float]] = {name: [] for name in names}
    for turn in range(_NUM_ROUNDS * num_layers):
        times_s: dict[LinearBackendName, float] = {}
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]  # none is always the first
            layer = forms[name][(turn + place * num_layers // len(names)) % num_layers]
            times_s[name] = _time_s(layer, height)
        for name, time_s in times_s.items():
            ratios[name].append(time_s / times_s["torch"])
    return {name: statistics.median(of_turns) for name, of_turns in ratios.items()}


def _time_s(matrices: list[Matrix], height: int) -> float:
    """Of one product with each."""
    inputs = [torch.ones(height, matrix.shape[1]) for matrix in matrices]
    start_s = time.perf_counter()
    for x, matrix in zip(inputs, matrices, strict=True):
        linear(x, matrix)
    return time.perf_counter() - start_s
