"""The forward thread without a thread: plans and commands run when a test says so, on Trio's.

Public kit. It is the real ``ForwardThread``, whose ``serve`` a test calls where it ``has_work``.
For tests under a mock clock, which does not see threads.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trio_engine.engine.forward_thread import ForwardThread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from trio_engine.executor.base import Executor


@asynccontextmanager
async def open_inline_forward(
    executor: Executor, on_event: Callable[[], object]
) -> AsyncGenerator[ForwardThread]:
    """As ``open_forward_thread``. Cancellation: nothing runs, so nothing is waited for."""
    forward = ForwardThread(executor, on_event)
    forward.load()
    try:
        yield forward
    finally:
        forward.stop()
        forward.shut_down()
