"""Front ends in processes of their own, as a test sees and breaks them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from tests.faults.breaking_engines import CLOSE_SIGNAL
from tests.faults.matrix import Means

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FrontEndProcess:
    """A process that says on its standard output how far it has come."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.output = ""
        assert process.stdout is not None
        self._stdout = process.stdout

    async def wait_said(self, words: str) -> str:
        """Returns the rest of the first line that holds these words."""
        while words not in self.output or "\n" not in self.output.partition(words)[2]:
            more = await self._stdout.receive_some()
            assert more, self.output
            self.output += more.decode()
        return self.output.partition(words)[2].partition("\n")[0]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def break_by(self, means: Means) -> None:
        """Ends it, or freezes it."""
        if means is Means.STOP:
            self.process.send_signal(signal.SIGSTOP)
            return
        self.process.send_signal(CLOSE_SIGNAL if means is Means.CLOSE else signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def open_front_end_process(
    module: str, *arguments: str, tmpdir: str | None = None
) -> AsyncIterator[FrontEndProcess]:
    """Runs ``python -m tests.faults.MODULE``; kills it at the end."""
    env = os.environ if tmpdir is None else {**os.environ, "TMPDIR": tmpdir}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", f"tests.faults.{module}", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
    )
    front_end = FrontEndProcess(process)
    try:
        yield front_end
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            await front_end._stdout.aclose()
