"""Engine processes for tests: the real command, and the same with an executor of the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from tests.fair_time import wait_within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

NULL_OPTIONS = ("--executor=null", "--max-model-len=2048", "--num-blocks=512", "--max-num-seqs=4")

# All of the command but the executor, which the option --executor cannot name.
_PROGRAM = """
from trio_engine.engine.__main__ import exit_at_signals

exit_at_signals()

import argparse, os, signal, sys, time
from trio_engine.cli.engine import run_proc
from trio_engine.engine.engine_core_proc import EngineCoreProc
from trio_engine.engine_arguments import add_engine_arguments, config_from_arguments
from trio_engine.errors import ModelError
from trio_engine.executor.null import NullExecutor
from trio_engine.observability.logs import configure_logging

parser = argparse.ArgumentParser()
parser.add_argument("--handshake-address")
parser.add_argument("--owner-fd", type=int)
add_engine_arguments(parser)
options = parser.parse_args()
configure_logging()

class Scripted(NullExecutor):
{executor}

class Proc(EngineCoreProc):
{proc}

sys.exit(
    run_proc(
        Proc(
            config_from_arguments(options),
            Scripted,
            handshake_address=options.handshake_address,
            owner_descriptor=options.owner_fd,
            owns_process=True,
        )
    )
)
"""


def engine_command(*options: str) -> list[str]:
    """The command as a user writes it."""
    return [sys.executable, "-m", "trio_engine", "engine", *NULL_OPTIONS, *options]


def scripted_command(*options: str, executor: str = "pass", proc: str = "pass") -> list[str]:
    """The command with bodies of a null executor's and an engine's subclass."""
    program = _PROGRAM.format(executor=_body(executor), proc=_body(proc))
    return [sys.executable, "-c", program, *NULL_OPTIONS, *options]


def _body(text: str) -> str:
    return textwrap.indent(textwrap.dedent(text).strip(), "    ")


LOADS_FOR_EVER = """
def load(self):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(600)
"""

LOAD_FAILS = """
def load(self):
    raise ModelError("no such model: /nowhere")
"""

STEP_NEVER_RETURNS = """
def collect(self):
    print("stepping", file=sys.stderr, flush=True)
    time.sleep(600)
"""


def steps_wait_while(path: Path, *, num_rows: int = 1) -> str:
    """Steps of so many rows or more do not end while there is a file."""
    return f"""
def launch(self, plan):
    super().launch(plan)
    self.is_held = len(plan.slots) >= {num_rows}

def collect(self):
    if self.is_held and os.path.exists({str(path)!r}):
        print("stepping", file=sys.stderr, flush=True)
        while os.path.exists({str(path)!r}):
            time.sleep(0.005)
    return super().collect()
"""


STEP_FAILS = """
def collect(self):
    raise RuntimeError("device lost")
"""

BIG_ANSWERS = """
num_answers = 0

def command(self, command):
    self.num_answers += 1
    print(f"{self.num_answers} answers", file=sys.stderr, flush=True)
    if command.method == "crash":
        raise SystemExit("device lost")
    return "x" * 200_000
"""


class EngineUnderTest:
    """A running engine process, its standard error, and its owner's end of the pipe."""

    def __init__(self, process: trio.Process, stderr_path: str, owner_end: int | None) -> None:
        self.process = process
        self._stderr_path = stderr_path
        self._owner_end = owner_end

    @property
    def stderr(self) -> str:
        """What it has written so far."""
        with open(self._stderr_path) as file:
            return file.read()

    async def wait_stderr(self, text: str) -> None:
        """Returns when it has written this."""
        while text not in self.stderr:
            ended = self.process.poll() is not None
            assert not ended or text in self.stderr, self.stderr
            await trio.sleep(0.005)  # a file cannot be waited on

    async def wait_handlers(self) -> None:
        """Returns when it has just set up its handlers; Python itself has none for SIGTERM."""
        while not self.catches(signal.SIGTERM):
            assert self.process.poll() is None, self.stderr
            await trio.lowlevel.checkpoint()

    def catches(self, number: signal.Signals) -> bool:
        """Whether it has a handler for a signal by now."""
        with open(f"/proc/{self.process.pid}/status") as file:
            masks = dict(line.rstrip("\n").split(":\t", 1) for line in file)
        return bool(int(masks["SigCgt"], 16) >> (number - 1) & 1)

    def send(self, *numbers: signal.Signals) -> None:
        """Sends signals, one after the other."""
        for number in numbers:
            self.process.send_signal(number)

    def end_owner(self) -> None:
        """Closes the pipe, as the end of the owner's process does."""
        assert self._owner_end is not None
        os.close(self._owner_end)
        self._owner_end = None

    async def wait(self, within_s: float) -> int:
        """Its exit status; negative for a signal.

        Raises:
            trio.TooSlowError: it is not gone within the time in which it could run.
        """
        return await wait_within(within_s, self.process.wait, self.process.pid)

    async def close(self) -> None:
        """Kills it if it still runs."""
        if self._owner_end is not None:
            self.end_owner()
        with trio.CancelScope(shield=True):
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def open_engine_under_test(
    command: Iterable[str], *, owned: bool = False
) -> AsyncIterator[EngineUnderTest]:
    """Runs an engine; kills it at the end if the test has not ended it.

    ``owned``: it gets a pipe whose other end ``end_owner`` closes.
    """
    command = list(command)
    with tempfile.NamedTemporaryFile() as stderr:
        ends = os.pipe() if owned else None
        if ends is not None:
            command.append(f"--owner-fd={ends[0]}")
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stderr=stderr.fileno(),
            pass_fds=[] if ends is None else [ends[0]],
        )
        if ends is not None:
            os.close(ends[0])
        engine = EngineUnderTest(process, stderr.name, None if ends is None else ends[1])
        try:
            yield engine
        finally:
            await engine.close()
