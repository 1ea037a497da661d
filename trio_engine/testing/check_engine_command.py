"""``python -m trio_engine.testing.check_engine``: the check as a command, and its options.

Public kit. What is checked is in ``check_engine``.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import trio

from trio_engine.client.engine_command import HANDSHAKE, PORT
from trio_engine.client.until_signal import run_until_signal
from trio_engine.errors import EngineError
from trio_engine.testing.check_engine import check_engine, promises
from trio_engine.testing.live_engine import EngineUnderCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.testing.engine_report import EngineReport, Finding

SIGNAL_STATUS = 128
"""What a shell adds to the number of the signal that ended a command."""


def _print_finding(finding: Finding) -> None:
    # At once: a slow engine takes minutes for all, and what was found must survive a Ctrl-C.
    sys.stdout.write(f"{finding.line()}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Checks the command in ``arguments`` and prints each finding as it comes.

    Returns:
        0 if every promise was kept, 1 if not, 2 if the command does not run an engine or an option
        makes no sense, 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP, which end the engine too.
    """
    options = _parser().parse_args(arguments)
    if options.list:
        for group, words in promises():
            sys.stdout.write(f"{group}: {words}\n")
        return 0
    # What the engine writes belongs to it; its last line is in the report where it matters.
    logging.getLogger("trio_engine").addHandler(logging.NullHandler())
    reports: list[EngineReport] = []
    try:
        stopped_by = trio.run(run_until_signal, partial(_check, options, reports.append))
    except EngineError as error:
        sys.stderr.write(f"check_engine: {error}\n")
        return 2
    except KeyboardInterrupt:
        return SIGNAL_STATUS + signal.SIGINT
    if stopped_by is not None:
        return SIGNAL_STATUS + stopped_by
    (report,) = reports
    sys.stdout.write(f"{report.summary()}\n")
    if not report.findings[0].is_ok:
        return 2
    return 0 if report.is_ok else 1


async def _check(options: argparse.Namespace, on_report: Callable[[EngineReport], object]) -> None:
    under_check = EngineUnderCheck(
        command=options.command,
        is_headless=options.headless,
        start_limit_s=options.start_limit,
        answer_limit_s=options.answer_limit,
        exit_limit_s=options.exit_limit,
    )
    on_finding = None if options.summary else _print_finding
    on_report(await check_engine(under_check, only=options.only, on_finding=on_finding))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trio_engine.testing.check_engine",
        usage="%(prog)s [OPTION]... -- COMMAND...",
        description="Check an engine that speaks vLLM's wire protocol, seen from outside only. Ends"
        " with 0 if every promise was kept, 1 if not, 2 if the command does not run an engine.",
    )
    parser.add_argument(
        "--headless",
        action="store_true",
        help="the engine says that it is headless (it has an option --headless itself)",
    )
    for flag, default, what in (
        ("--start-limit", 300.0, "from its start to READY"),
        ("--answer-limit", 5.0, "for what it is asked"),
        ("--exit-limit", 3.0, "from SIGTERM to its end"),
    ):
        parser.add_argument(
            flag,
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{what} (default: {default:g} s)",
        )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help=f"what has this in its group ({', '.join(dict(promises()))}) or its words, beside the"
        " start (default: all)",
    )
    parser.add_argument("--summary", action="store_true", help="print the counts only")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--list", action="store_true", help="print what is checked, and end")
    which.add_argument(
        "command",
        nargs="*",
        default=[],
        metavar="COMMAND",
        help=f"runs an engine; {HANDSHAKE} becomes the front end's address, {PORT} its port of"
        " 127.0.0.1",
    )
    return parser
