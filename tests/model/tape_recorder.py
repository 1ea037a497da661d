"""Records functions on CPU with what makes CUDA graphs hard: fixed memory, and values baked in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trio_engine.model.decode_graphs import Recording

if TYPE_CHECKING:
    from collections.abc import Callable


class _Tape(TorchDispatchMode):
    """Notes every operation with the very tensors that it took and gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(result), again, strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """A recorder of CPU operations.

    Args:
        fails: raise, as if memory had run out.

    Attributes:
        num_recorded: functions, those that failed included.
        num_forgotten: calls of ``forget``.
    """

    def __init__(self, *, fails: bool = False) -> None:
        self.num_recorded = self.num_forgotten = 0
        self._fails = fails

    def record(self, function: Callable[[], torch.Tensor]) -> Recording:
        self.num_recorded += 1
        function()
        if self._fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        with _Tape() as tape:
            out = function()
        out.fill_(torch.nan)  # a capture computes nothing
        return Recording(tape.replay, out)

    def forget(self) -> None:
        self.num_forgotten += 1
