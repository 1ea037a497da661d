"""What every engine must do, as a check of a command that is seen from outside only.

Public kit. Imports neither torch nor pytest. Any command will do that runs an engine with vLLM's
wire protocol:

    python -m trio_engine.testing.check_engine -- COMMAND... {handshake} ...
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
from trio_engine.errors import ConfigError, EngineError
from trio_engine.testing.engine_promises import CALLS, EARLY_ENDS, ENDS, SERVING, survives
from trio_engine.testing.engine_report import EngineReport, Finding
from trio_engine.testing.live_engine import EngineUnderCheck, LiveEngine, open_live_engine
from trio_engine.testing.wire_faults import WIRE_FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from trio_engine.testing.engine_promises import Promise

SIGNAL_STATUS = 128
"""What a shell adds to the number of the signal that ended a command."""

ANSWERS_PER_CHECK = 3
"""How many answers in a row one check waits for; each may take its time."""


async def check_engine(
    command: Sequence[str] | EngineUnderCheck,
    *,
    only: str = "",
    on_finding: Callable[[Finding], object] | None = None,
) -> EngineReport:
    """Checks an engine as a front end sees it: start-up, answers, faults, calls, ends.

    An engine that breaks a promise is killed, and the next check gets a fresh one; so all are
    checked, whatever fails. Its steps should take a millisecond or more, or requests have ended
    before anything can happen beside them.

    Args:
        command: runs an engine; ``{handshake}`` in it becomes the front end's address, ``{port}``
            its port on 127.0.0.1. As ``EngineUnderCheck`` with limits of time.
        only: checks what has this in its group or its words, beside the start.
        on_finding: called with each finding as soon as there is one.

    Returns:
        What was kept and what was broken; only one finding if it does not even start.

    Raises:
        ConfigError: no promise has ``only`` in its group or its words.
        EngineStartError: the command cannot be run.

    Cancellation: ends the engine that runs.

    Example::

        report = await check_engine(["trio-engine", "engine", "--executor=null",
                                     "--null-step-ms=2", "--handshake-address={handshake}"])
        assert report.is_ok, report.table()
    """
    if not isinstance(command, EngineUnderCheck):
        command = EngineUnderCheck(command=list(command))
    check_is_known(only)
    checker = _Checker(command, only, on_finding)
    await checker.run()
    return checker.report


START = "it starts, and answers its first request"

_GROUPS: dict[str, Iterable[str]] = {
    "start": [START],
    "serving": SERVING,
    "calls": CALLS,
    "faults": [fault.name for fault in WIRE_FAULTS],
    "ends": [*EARLY_ENDS, *ENDS],
}


def promises() -> list[tuple[str, str]]:
    """Group and words of all that is checked, in this order."""
    return [(group, words) for group, of_group in _GROUPS.items() for words in of_group]


def check_is_known(only: str) -> None:
    """Refuses what would check nothing.

    Raises:
        ConfigError: no promise has it in its group or its words.
    """
    if not any(only in f"{group} {words}" for group, words in promises()):
        raise ConfigError(
            f"no promise has {only!r} in its group or its words: the groups are"
            f" {', '.join(_GROUPS)}, and --list shows all"
        )


class _Checker:
    """One run of all checks."""

    def __init__(
        self,
        under_check: EngineUnderCheck,
        only: str,
        on_finding: Callable[[Finding], object] | None,
    ) -> None:
        self.report = EngineReport(command=under_check.command)
        self._only = only
        self._on_finding = on_finding
        self._under_check = under_check

    async def run(self) -> None:
        started = await self._note("start", START, _nothing)
        if not started:
            return
        await self._check_together("serving", SERVING)
        await self._check_together("calls", CALLS)
        faults = {fault.name: partial(survives, fault=fault) for fault in WIRE_FAULTS}
        await self._check_together("faults", faults)
        for promise, check in self._wanted("ends", EARLY_ENDS):
            await self._note("ends", promise, check, is_started=False)
        for promise, check in self._wanted("ends", ENDS):
            await self._note("ends", promise, check)

    def _wanted(self, group: str, checks: Mapping[str, Promise]) -> list[tuple[str, Promise]]:
        return [item for item in checks.items() if self._only in f"{group} {item[0]}"]

    async def _check_together(self, group: str, checks: Mapping[str, Promise]) -> None:
        """One engine for all, or for as many as it lives through."""
        waiting = self._wanted(group, checks)
        while waiting:
            promise, check = waiting.pop(0)
            async with open_live_engine(self._under_check) as live:
                why = await self._start(live) or await self._try(live, check)
                self._add(group, promise, why)
                while waiting and not why:
                    promise, check = waiting.pop(0)
                    why = await self._try(live, check)
                    self._add(group, promise, why)

    async def _note(
        self, group: str, promise: str, check: Promise, *, is_started: bool = True
    ) -> bool:
        """An engine of its own for one check; whether the promise was kept."""
        async with open_live_engine(self._under_check) as live:
            why = await self._start(live) if is_started else ""
            why = why or await self._try(live, check, may_end=True)
        self._add(group, promise, why)
        return not why

    def _add(self, group: str, promise: str, why: str) -> None:
        finding = Finding(group=group, promise=promise, why=why)
        self.report.findings.append(finding)
        if self._on_finding is not None:
            self._on_finding(finding)

    async def _start(self, live: LiveEngine) -> str:
        """Why it does not start; empty if it does."""

        async def start(live: LiveEngine) -> None:
            await live.start_up()
            await live.calibrate()

        return await self._try(live, start, limit_s=self._under_check.start_limit_s)

    async def _try(
        self,
        live: LiveEngine,
        check: Promise,
        *,
        may_end: bool = False,
        limit_s: float | None = None,
    ) -> str:
        """Why a promise is broken; empty if it is kept."""
        if limit_s is None:
            limit_s = ANSWERS_PER_CHECK * self._under_check.answer_limit_s
        if may_end:
            limit_s += self._under_check.start_limit_s
        with trio.move_on_after(limit_s) as scope:
            if not may_end:
                live.cancel_at_exit(scope)
            try:
                await check(live)
                return ""
            except (AssertionError, EngineError, trio.TooSlowError) as error:
                return await _explain(live, str(error) or type(error).__name__)
        return await _explain(live, f"no answer within {limit_s:g} s")


async def _explain(live: LiveEngine, reason: str) -> str:
    # It may be on its way out, and how it ends says more.
    with trio.move_on_after(live.under_check.exit_limit_s):
        await live.process.wait()
    end = live.describe_end()
    if not end or reason.startswith("no answer"):
        return end or reason
    return f"{reason}; {end}"


async def _nothing(_: LiveEngine) -> None:
    pass


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
        help=f"what has this in its group ({', '.join(_GROUPS)}) or its words, beside the start"
        " (default: all)",
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
