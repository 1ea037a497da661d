"""Being asked to stop: by signals, by the owner's end, by a caller in the same process.

Engine. Whoever asks, it ends in one place, ``Shutdown.request``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal

import trio

from trio_engine.errors import ConfigError

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Whether and how urgently the engine was asked to stop.

    A first request starts a drain (or an abort, where no drain is configured); any further one
    shortens a drain to an abort. Nothing cuts the clean-up itself short.
    """

    def __init__(self) -> None:
        self.requested = trio.Event()
        self.abort_requested = trio.Event()
        self.owner_is_gone = False
        # Signals that came before Trio could receive them, noted by plain handlers.
        self.early_signals: list[str] = []

    def request(self, reason: str) -> None:
        """Asks for a stop; ``reason`` is for the log."""
        logger.info("stop_requested reason=%r", reason)
        if self.requested.is_set():
            self.abort_requested.set()
        self.requested.set()

    def lose_owner(self) -> None:
        """The owner's process has ended: nobody is there to drain or to flush for."""
        self.owner_is_gone = True
        self.abort_requested.set()
        self.request("owner is gone")


async def watch_signals(
    shutdown: Shutdown, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Turns SIGTERM and SIGINT into requests to stop. Only in the main thread."""
    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        for name in shutdown.early_signals:
            shutdown.request(name)
        task_status.started()
        async for number in signals:
            shutdown.request(signal.Signals(number).name)


async def watch_owner(shutdown: Shutdown, descriptor: int) -> None:
    """Waits for the end of the process that holds the other end of a pipe.

    The owner never writes: the end of the pipe is the end of the owner.

    Raises:
        ConfigError: nobody can wait for this descriptor.
    """
    try:
        os.set_blocking(descriptor, False)
        while True:
            await trio.lowlevel.wait_readable(descriptor)
            with contextlib.suppress(BlockingIOError):
                if not os.read(descriptor, 4096):
                    break
    except OSError as error:
        raise ConfigError(f"owner descriptor {descriptor} is no pipe: {error}") from error
    shutdown.lose_owner()
