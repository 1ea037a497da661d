"""The process that tries grammars (``structured/trial.py``), as the engine sees it.

Engine. It does one job at a time; left in the middle of one it is of no more use.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import trio

from trio_engine.errors import ModelError
from trio_engine.structured.trial import LENGTH_BYTES, TOO_MUCH_MEMORY, frame

if TYPE_CHECKING:
    from typing import Self

    from trio_engine.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

TRIAL_COMMAND = (sys.executable, "-m", "trio_engine.structured.trial")

START_TIMEOUT_S = 60.0
"""It imports and builds what takes two seconds; a busy machine may take ten times that."""

REAP_TIMEOUT_S = 2.0
"""A killed process computes nothing: it is gone in milliseconds, or hangs in the kernel."""

STACK_OVERFLOW = "it nests too deeply, or refers to itself too often"

_FAULTS = {-signal.SIGSEGV: STACK_OVERFLOW, -signal.SIGABRT: TOO_MUCH_MEMORY}


class TrialProcess:
    """A process that waits for a job. Made by ``start``."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._jobs, self._answers = process.stdin, process.stdout

    @classmethod
    async def start(cls, vocabulary: Vocabulary) -> Self:
        """Starts a process for grammars of a vocabulary. Takes about a second.

        Raises:
            ModelError: it did not start, or cannot work with the vocabulary.

        Cancellation: the process is ended.
        """
        # A session of its own: Ctrl-C is for the engine, which may go on to answer requests.
        process = await trio.lowlevel.open_process(
            TRIAL_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        trial = cls(process)
        why = f"gave no sign within {START_TIMEOUT_S:g} s"
        try:
            with trio.move_on_after(START_TIMEOUT_S):
                why = await trial._ask(msgspec.msgpack.encode(vocabulary))
        except BaseException:
            await trial.aclose()
            raise
        if why:
            await trial.aclose()
            raise ModelError(f"the process that tries grammars failed: {why}")
        return trial

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    async def try_grammar(self, source: str) -> str:
        """Compiles a source there. Returns why that failed, or an empty text.

        Cancellation: it goes on; close it.
        """
        return await self._ask(source.encode())

    async def aclose(self) -> None:
        """Kills it, whatever it does, and waits until it is gone.

        Cancellation: shielded, since it must not be left behind; a killed process ends at once.
        """
        self._process.kill()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + REAP_TIMEOUT_S):
            await self._jobs.aclose()
            await self._answers.aclose()
            await self._process.wait()

    async def _ask(self, message: bytes) -> str:
        try:
            await self._jobs.send_all(frame(message))
            length = int.from_bytes(await self._receive(LENGTH_BYTES), "little")
            return (await self._receive(length)).decode()
        except trio.BrokenResourceError:
            return await self._explain_end()

    async def _receive(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            more = await self._answers.receive_some(num_bytes - len(data))
            if not more:
                raise trio.BrokenResourceError("the process has ended")
            data += more
        return bytes(data)

    async def _explain_end(self) -> str:
        status = await self._process.wait()
        logger.warning("grammar_trial_ended status=%d", status)
        return _FAULTS.get(status, f"compiling it ended a process with status {status}")
