"""Which device and number format to compute in, and how host arrays get there.

Layer: model. The one place that knows what torch raises when memory runs out.
"""

from __future__ import annotations

import ctypes
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trio_engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from trio_engine.config import DeviceName, DTypeName

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What the CPU allocator and mmap say; torch has no type of its own for it off CUDA.
_CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


def resolve_device(name: DeviceName) -> torch.device:
    """Turns the option ``device`` into a device of this machine.

    Raises:
        ConfigError: CUDA is asked for and torch finds none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device 'cuda' is not available: torch finds no CUDA device here")
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """Turns the option ``dtype`` into the type of weights and KV cache.

    ``auto`` is float32 on CPU: without AVX-512 or AMX the half types are slower there.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a type without its module, as front ends are told it."""
    return str(dtype).removeprefix("torch.")


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Brings a host array to a device without waiting for it.

    Returns:
        On CPU a tensor over the array's own memory, which must then not be rewritten.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def return_freed_memory(device: torch.device) -> None:
    """Hands memory that no tensor holds any more back to the device, for other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)


@contextmanager
def out_of_memory_as(error_type: type[EngineError], doing: str) -> Iterator[None]:
    """Translates torch's, numpy's and the system's out-of-memory errors into one of ours.

    What was half made is let go of: the error may be kept for long, and memory is short.

    Args:
        error_type: what to raise instead.
        doing: completes "out of memory while ...".
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        traceback.clear_frames(error.__traceback__)
        raise error_type(f"out of memory while {doing}: {_first_line(error)}") from error
    except (RuntimeError, OSError) as error:
        if not any(phrase in str(error) for phrase in _CPU_OUT_OF_MEMORY):
            raise
        traceback.clear_frames(error.__traceback__)
        raise error_type(f"out of memory while {doing}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
