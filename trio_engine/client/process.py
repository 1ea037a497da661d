"""The engine's process as seen by its owner: spawned, listened to, and surely ended.

Knows nothing of ZeroMQ or requests. The ladder at the end (ask, wait, kill, reap) is the one place
that signals a child.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections import deque
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from trio_engine.errors import EngineStartError
from trio_engine.observability.logs import parse_progress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from trio_engine.client.service_tasks import ServiceTasks

engine_logger = logging.getLogger("trio_engine.engine")
"""Where the child's lines go, so that a service routes them as its own."""

logger = logging.getLogger(__name__)

STDERR_TAIL_LINES = 50
"""Kept for error messages: a Python traceback through torch is about 40 lines."""

MAX_LINE_BYTES = 64 << 10
"""A longer line is cut there: a child that never ends its line must not grow our memory."""

LAST_LINES_S = 0.5
"""Wait for the rest of a dead child's output. Its pipe is at its end at once, unless a grandchild
holds it open."""

REAP_TIMEOUT_S = 5.0
"""Wait for a killed process to be gone. Only one that hangs in the kernel (a GPU driver, a dead
network disk) takes longer, and waiting more would not help it."""


class EngineProcess:
    """A running engine process. Made by ``open_engine_process``.

    Attributes:
        pid: of the process, which leads a session and process group of its own.
    """

    def __init__(self, process: trio.Process, output_fd: int) -> None:
        self.pid = process.pid
        self._process = process
        self._output = trio.lowlevel.FdStream(output_fd)
        self._tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        self._output_ended = trio.Event()

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    @property
    def stderr_tail(self) -> str:
        """The last lines that it wrote, with newlines between."""
        return "\n".join(self._tail)

    @property
    def last_line(self) -> str:
        """The last line that it wrote, empty if there is none; often why it ended."""
        return self._tail[-1].strip() if self._tail else ""

    def describe_exit(self) -> str:
        """How it ended, in words: ``exit status 1`` or ``killed by SIGKILL``."""
        status = self.exit_status
        if status is None:
            return "still running"
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"

    async def wait(self) -> None:
        """Waits until it has ended and its last lines are in ``stderr_tail``.

        Cancellation: nothing changes; any number of tasks may wait.
        """
        await self._process.wait()
        with trio.move_on_after(LAST_LINES_S):
            await self._output_ended.wait()

    async def read_output(self) -> None:
        """Hands the child's lines to the logger until it closes its end. Run by one task."""
        pending = b""
        try:
            async for data in self._output:
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._note_line(line)
                if len(pending) > MAX_LINE_BYTES:
                    self._note_line(pending)
                    pending = b""
            if pending:
                self._note_line(pending)
        except trio.ClosedResourceError:
            pass  # by ``aclose``: a grandchild holds the other end open
        finally:
            self._output_ended.set()

    def _note_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if self._tail and _is_progress(text) and _is_progress(self._tail[-1]):
            self._tail.pop()  # twenty lines of a load would hide what came before it
        self._tail.append(text)
        engine_logger.info("%s", text)

    async def aclose(self, terminate_timeout_s: float) -> None:
        """Climbs the ladder: SIGTERM, wait, SIGKILL to its group, reap; then closes its output.

        Cancellation: shielded, since a process left behind would hold the device. Takes
        ``terminate_timeout_s``, ``REAP_TIMEOUT_S`` and ``LAST_LINES_S`` at most. A second Ctrl-C,
        which Trio raises through a shield, skips to SIGKILL.
        """
        with trio.CancelScope(shield=True):  # each wait below has a deadline of its own
            try:
                await self._terminate(terminate_timeout_s)
            finally:
                self._kill_if_running()
                await self._reap()
                with trio.move_on_after(LAST_LINES_S):
                    await self._output_ended.wait()
                await self._output.aclose()

    async def _terminate(self, timeout_s: float) -> None:
        if self.exit_status is None:
            self._process.terminate()
            with trio.move_on_after(timeout_s):
                await self._process.wait()

    def _kill_if_running(self) -> None:
        if self.exit_status is None:
            logger.warning("engine_killed pid=%d", self.pid)
            # Its group, because an executor may have helpers. Only while it is not reaped: later
            # the number could be a stranger's.
            os.killpg(self.pid, signal.SIGKILL)

    async def _reap(self) -> None:
        with trio.move_on_after(REAP_TIMEOUT_S):
            await self._process.wait()
        if self.exit_status is None:
            logger.error("engine_not_reaped pid=%d waited_s=%.1f", self.pid, REAP_TIMEOUT_S)


@asynccontextmanager
async def open_engine_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    terminate_timeout_s: float,
    tasks: ServiceTasks,
) -> AsyncIterator[EngineProcess]:
    """Spawns ``command`` and ends it with the block.

    It gets a session of its own, so that Ctrl-C at the terminal reaches its owner only. Its
    standard input is a pipe that nobody writes to: end-of-file there tells it that its owner is
    gone, by whatever way. PR_SET_PDEATHSIG would not do: it follows the *thread* that forked, and
    Trio's ends after 10 idle seconds. Standard output and error are one pipe, so that a library
    that prints cannot write into its owner's output.

    Raises:
        EngineStartError: the command cannot be run.

    Cancellation: while spawning, waits for the fork's outcome, then ends what it made.
    """
    child_input, owner = os.pipe()
    with ExitStack() as held:
        # Last of all: closing it tells the child that its owner is gone. It is not inheritable,
        # or any other child of ours would keep the engine alive after us.
        held.callback(os.close, owner)
        process = await _spawn(command, env, child_input)
        try:
            tasks.start_soon(process.read_output)
            yield process
        finally:
            await process.aclose(terminate_timeout_s)


def _is_progress(line: str) -> bool:
    return parse_progress(line) is not None


async def _spawn(
    command: Sequence[str], env: Mapping[str, str] | None, child_input: int
) -> EngineProcess:
    """Starts the process and closes the ends that are its own now, ``child_input`` among them."""
    output, child_output = os.pipe()
    try:
        process = await trio.lowlevel.open_process(
            list(command),
            stdin=child_input,
            stdout=child_output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        )
    except BaseException as error:
        os.close(output)
        if isinstance(error, OSError):
            raise EngineStartError(f"cannot run {command[0]!r}: {error}") from error
        raise
    finally:
        os.close(child_input)
        os.close(child_output)
    return EngineProcess(process, output)
