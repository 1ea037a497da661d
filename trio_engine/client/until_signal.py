"""Ends a program's work in good order when a signal asks for it.

For programs that spawn engines: SIGTERM would end them at once, and an engine that does not watch
its owner would stay behind. Ctrl-C needs nothing, since Trio raises it in the main task.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import trio

from trio_engine.client.service_tasks import open_service_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


async def run_until_signal(work: Callable[[], Awaitable[object]]) -> signal.Signals | None:
    """Runs ``work`` and cancels it at SIGTERM or SIGHUP. For the main thread.

    A SIGHUP that is ignored, as under ``nohup``, stays so.

    Returns:
        The signal that cut it short; None if it came to its end.
    """
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    received: list[signal.Signals] = []
    with trio.open_signal_receiver(*numbers) as signals:
        async with open_service_tasks() as tasks:
            with trio.CancelScope() as scope:
                tasks.start_soon(_cancel_at_first, signals, scope, received)
                await work()
    return received[0] if scope.cancelled_caught else None


async def _cancel_at_first(
    signals: AsyncIterator[int], scope: trio.CancelScope, received: list[signal.Signals]
) -> None:
    async for number in signals:
        received.append(signal.Signals(number))
        scope.cancel(f"{received[-1].name} asked for the end")
