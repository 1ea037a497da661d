"""Devices, number formats, and the one translation of out-of-memory errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trio_engine.errors import StepError
from trio_engine.model.device import (
    dtype_name,
    out_of_memory_as,
    resolve_device,
    resolve_dtype,
    to_device,
)

CPU = torch.device("cpu")


def test_auto_takes_what_is_there() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_auto_is_float32_on_cpu_and_bfloat16_on_cuda() -> None:
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert resolve_dtype("float16", CPU) is torch.float16
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_an_array_on_the_cpu_is_not_copied() -> None:
    array = np.arange(3)
    tensor = to_device(array, CPU)
    array[1] = 7
    assert tensor.tolist() == [0, 7, 2]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_runs_out_is_translated(error: Exception) -> None:
    with (
        pytest.raises(StepError, match="out of memory while dreaming: ") as caught,
        out_of_memory_as(StepError, "dreaming"),
    ):
        raise error
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory_as(StepError, "dreaming"):
        raise RuntimeError("shapes cannot be multiplied")


def test_a_real_allocation_that_cannot_be_is_translated() -> None:
    with pytest.raises(StepError), out_of_memory_as(StepError, "asking for 4 EiB"):
        torch.empty(1 << 60, dtype=torch.float32)
