"""Engine processes for tests: the real command, and small programs around ``EngineCoreProc``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

NULL_OPTIONS = [
    "--executor=null",
    "--max-model-len=2048",
    "--num-blocks=512",
    "--max-num-seqs=4",
    "--flush-timeout=0.5",
]

_PRELUDE = """
import os, sys, time
from dataclasses import dataclass
from trio_engine.cli import engine as command
from trio_engine.errors import ModelError
from trio_engine.executor.null import NullExecutor
from trio_engine.observability.logs import configure_logging
"""


def engine_command(*options: str) -> list[str]:
    """The command as a user would write it."""
    return [sys.executable, "-m", "trio_engine", "engine", *options]


def scripted_command(executor: str, *options: str) -> list[str]:
    """The command with another null executor: ``executor`` is the body of its class.

    Which executor there is, is all that differs; entry, signals and exits are the real ones.
    """
    body = textwrap.indent(textwrap.dedent(executor), "    ")
    program = (
        f"from trio_engine.engine.__main__ import exit_at_signals\\nexit_at_signals()\\n{_PRELUDE}"
        f"\\nclass Scripted(NullExecutor):\\n{body}\\n"
        "command.make_executor = Scripted\\nsys.exit(command.run(sys.argv[1:]))\\n"
    ).replace("\\\\n", "\\n")
    return [sys.executable, "-c", program, *options]
