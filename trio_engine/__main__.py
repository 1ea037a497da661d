"""``trio-engine`` and ``python -m trio_engine``: finds the command and hands over to it.

Entry. Imports nothing of the package before a command is chosen: the engine's own entry must
stand first in its process.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

TYPE_CHECKING = False  # as in the package's own file

if TYPE_CHECKING:
    from typing import Any

COMMANDS = {
    "generate": "stream a model's answer to one or several prompts",
    "engine": "run the engine process behind a front end",
    "bench": "put a load on engines and show what comes of it",
}

INTERRUPTED_STATUS = 130
"""What a shell expects of a command that Ctrl-C ended."""


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trio-engine COMMAND [OPTION]...",
            "       trio-engine --version",
            "",
            "commands:",
            *lines,
            "",
            "trio-engine COMMAND --help shows a command's options, with defaults and units.",
        ]
    )


def run_command(name: str, arguments: list[str]) -> int:
    """Imports a command and runs it; Ctrl-C during either ends it without a traceback."""
    command = import_at_once(f"trio_engine.cli.{name}")
    try:
        status: int = command.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    return status


def import_at_once(module_name: str) -> Any:
    """A command's module. Ctrl-C meanwhile ends the process at once, without a traceback.

    There is nothing to clean up yet, and an import must not go on after an interruption in its
    midst: a C library that is half initialized crashes when it is used.
    """
    is_python_s = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_python_s:  # else it is ignored, as for jobs in the background, and stays so
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED_STATUS))
    try:
        return importlib.import_module(module_name)
    finally:
        if is_python_s:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    """Runs the command that ``sys.argv`` names. Returns the exit status."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name == "engine":
        from trio_engine.engine.__main__ import main as run_engine

        return run_engine(arguments)
    if name in COMMANDS:
        return run_command(name, arguments)
    if name in ("--version", "-V"):
        from trio_engine import __version__

        sys.stdout.write(f"trio-engine {__version__}\n")
        return 0
    asked = name in ("-h", "--help")
    stream = sys.stdout if asked else sys.stderr
    stream.write(usage() + "\n" if asked else f"trio-engine: no command {name!r}\n{usage()}\n")
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
