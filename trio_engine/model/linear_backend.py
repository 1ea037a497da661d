"""Which form of float32 matrices a CPU multiplies with fastest: measured, unless it is named.

Layer: model. The best of several ways depends on the machine. A row through a model of 135 million
parameters takes 64 ms by torch's linear layers on one machine and 33 ms with swapped matrices; on
another it takes 23 and 41.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from trio_engine.errors import ConfigError
from trio_engine.model.linear import PackedMatrix, SwappedMatrix, can_pack, linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from trio_engine.config import EngineConfig, LinearBackendName
    from trio_engine.model.config import ModelConfig
    from trio_engine.model.matrix import Matrix

# A smaller matrix stays in the caches, where no form gains much.
_LEAST_ELEMENTS = 1 << 18
# A step reads all of a model, so what is measured must not stay in a cache either: in a cache of
# 260 MB that others used as well, 24 MB had another form win than 128 and 256, and 64 had either
# win. 128 take half a second on 2 cores.
_SAMPLE_BYTES = 128 << 20
# Rows: a request that decodes alone, a few that do, and a prompt.
_HEIGHTS = (1, 8, 64)
# The shortest counts: what else the machine does only adds.
_NUM_ROUNDS = 3
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
    if device.type != "cpu" or dtype is not torch.float32 or config.quantization is not None:
        raise ConfigError(
            f"linear_backend {name!r} is for weights that are kept as float32 on device 'cpu'"
        )
    if name == "mkl" and not can_pack():
        raise ConfigError("linear_backend 'mkl' needs a torch with MKL, which this one is not")


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
    sample = list(_sample(model))
    if device.type != "cpu" or dtype is not torch.float32 or not sample:
        return "torch"
    names: list[LinearBackendName] = ["torch", "swapped"]
    if can_pack():
        names.append("mkl")
    return _fastest({name: [in_form_of(name, matrix) for matrix in sample] for name in names})


def in_form_of(name: LinearBackendName, matrix: Tensor) -> Matrix:
    """A matrix ``[out, in]`` as a backend multiplies with it; small ones stay as they are."""
    if name == "torch" or matrix.numel() < _LEAST_ELEMENTS:
        return matrix
    return PackedMatrix(matrix) if name == "mkl" else SwappedMatrix(matrix)


def _sample(model: ModelConfig) -> Iterator[Tensor]:
    """Matrices of the shapes of one layer after the other, cut where they are very large."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    queries = model.num_heads * model.head_dim
    qkv = queries + 2 * model.num_kv_heads * model.head_dim
    shapes = ((qkv, hidden), (hidden, queries), (2 * intermediate, hidden), (hidden, intermediate))
    num_bytes = 0
    for num_out, num_in in shapes * model.num_layers:
        num_rows = min(num_out, max(64, _SAMPLE_BYTES // 16 // num_in))
        if num_rows * num_in >= _LEAST_ELEMENTS:
            yield torch.full((num_rows, num_in), 0.01)
            num_bytes += 4 * num_rows * num_in
        if num_bytes > _SAMPLE_BYTES:
            return


@torch.inference_mode()
def _fastest(forms: dict[LinearBackendName, list[Matrix]]) -> LinearBackendName:
    """That whose times, each relative to the best one of a height, are the least in sum."""
    slowness = dict.fromkeys(forms, 0.0)
    for height in _HEIGHTS:
        inputs = [torch.ones(height, matrix.shape[1]) for matrix in forms["torch"]]
        times_s = _shortest_times_s(forms, inputs)
        for name, time_s in times_s.items():
            slowness[name] += time_s / min(times_s.values())
    best = min(slowness, key=slowness.__getitem__)
    return best if slowness["torch"] > _LEAST_GAIN * slowness[best] else "torch"


def _shortest_times_s(
    forms: dict[LinearBackendName, list[Matrix]], inputs: list[Tensor]
) -> dict[LinearBackendName, float]:
    """Of each form's products with all inputs; the forms take turns."""
    times_s = dict.fromkeys(forms, float("inf"))
    for _ in range(_NUM_ROUNDS):
        for name, matrices in forms.items():
            start_s = time.perf_counter()
            for x, matrix in zip(inputs, matrices, strict=True):
                linear(x, matrix)
            times_s[name] = min(times_s[name], time.perf_counter() - start_s)
    return times_s
