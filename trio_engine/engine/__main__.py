"""``python -m trio_engine.engine``: the engine process, deaf to no signal from here on.

Entry. Only os, signal and sys before the handlers stand: an import of the rest takes long enough
for a signal to arrive, and the default would kill the process without a word.
"""

import os
import signal
import sys


def exit_at_signals() -> None:
    """Until the engine runs there is nothing to clean up: SIGTERM and SIGINT just end it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))


def main(arguments: list[str]) -> int:
    """Runs the engine command. Returns the exit status (``engine.exit.ExitStatus``)."""
    exit_at_signals()
    from trio_engine.cli.engine import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
