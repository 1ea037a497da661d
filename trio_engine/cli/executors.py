"""Executors by the name that ``--executor`` takes.

Cli. Each is imported when it is chosen: only the torch executor may need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trio_engine.config import EngineConfig
    from trio_engine.executor.base import Executor


def make_executor(config: EngineConfig) -> Executor:
    """The executor that ``config.executor`` names, not loaded."""
    if config.executor == "null":
        from trio_engine.executor.null import NullExecutor

        return NullExecutor(config)
    if config.executor == "kv-checking":
        from trio_engine.executor.kv_checking import KVCheckingExecutor

        return KVCheckingExecutor(config)
    from trio_engine.executor.torch_executor import TorchExecutor
    from trio_engine.observability.logs import LoadProgressLog

    return TorchExecutor(config, on_progress=LoadProgressLog())
