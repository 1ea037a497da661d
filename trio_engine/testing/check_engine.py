"""What every engine must do, as a check of a command that is seen from outside only.

Public kit. Imports neither torch nor pytest. Any command will do that runs an engine with vLLM's
wire protocol:

    python -m trio_engine.testing.check_engine -- COMMAND... {handshake} ...
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Before the imports below, which Ctrl-C would end with a traceback.
    from trio_engine.__main__ import import_at_once

    sys.exit(import_at_once("trio_engine.testing.check_engine_command").main(sys.argv[1:]))

from functools import partial
from typing import TYPE_CHECKING

import trio

from trio_engine.errors import ConfigError, EngineError
from trio_engine.testing.engine_promises import CALLS, EARLY_ENDS, ENDS, SERVING, survives
from trio_engine.testing.engine_report import EngineReport, Finding
from trio_engine.testing.live_engine import EngineUnderCheck, LiveEngine, open_live_engine
from trio_engine.testing.wire_faults import WIRE_FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from trio_engine.testing.engine_promises import Promise

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
