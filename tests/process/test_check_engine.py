"""``check_engine`` finds nothing wrong with this engine, and what is wrong with others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from tests.process.engine_programs import engine_command, scripted_command
from tests.process.processes import wait_ended
from tests.process.stand_ins import exits
from trio_engine.client.engine_command import fill_in
from trio_engine.testing.check_engine import check_engine, check_is_known
from trio_engine.testing.check_engine_command import main
from trio_engine.testing.engine_report import EngineReport, Finding
from trio_engine.testing.live_engine import EngineUnderCheck
from trio_engine.testing.wire_faults import WIRE_FAULTS, FaultContext, WireFault
from trio_engine.wire.codec import RequestDecoder, UndecodableRequest

if TYPE_CHECKING:
    from pathlib import Path

TEST_TIMEOUT_S = 280.0

ADDRESS = "--handshake-address={handshake}"
DIES_OF_WHAT_IT_CANNOT_DECODE = """
import trio_engine.engine.pumps

class Decoder(trio_engine.engine.pumps.RequestDecoder):
    def decode(self, frames):
        try:
            return super().decode(frames)
        except Exception:
            print("cannot decode this", file=sys.stderr, flush=True)
            os._exit(3)

trio_engine.engine.pumps.RequestDecoder = Decoder
"""

FORGETS_WHAT_IT_CANNOT_SERVE = """
from trio_engine.core.engine_core import EngineCore

EngineCore._refuse = lambda *args: None
EngineCore.refuse = lambda *args, **options: None
"""

IS_DEAF_TO_SIGNALS = """
from trio_engine.engine.shutdown import Shutdown

Shutdown.request = lambda *args: None
"""


async def check(
    command: list[str], *, only: str = "", answer_limit_s: float = 10.0, exit_limit_s: float = 5.0
) -> EngineReport:
    """With ample limits, for a busy machine."""
    under_check = EngineUnderCheck(
        command=[*command, ADDRESS], answer_limit_s=answer_limit_s, exit_limit_s=exit_limit_s
    )
    with trio.fail_after(TEST_TIMEOUT_S):
        return await check_engine(under_check, only=only)


@pytest.mark.slow
async def test_this_engine_keeps_every_promise() -> None:
    report = await check(engine_command("--null-step-ms=2"))
    assert report.is_ok, report.table()
    assert len(report.findings) == len(WIRE_FAULTS) + 16


@pytest.mark.slow
async def test_an_engine_that_dies_of_a_bad_frame_is_reported_for_each() -> None:
    command = scripted_command("--null-step-ms=2", proc=DIES_OF_WHAT_IT_CANNOT_DECODE)
    report = await check(command, only="UTILITY")
    failed = {finding.promise: finding.why for finding in report.failures}
    faults = [fault for fault in WIRE_FAULTS if "UTILITY" in fault.name]
    assert failed.keys() == {fault.name for fault in faults if is_undecodable(fault)}
    assert 3 < len(failed) < len(faults)
    assert set(failed.values()) == {"it has ended (exit status 3): cannot decode this"}


def is_undecodable(fault: WireFault) -> bool:
    try:
        RequestDecoder().decode(fault.frames(FaultContext("bad", "live", 1, 2048)))
    except UndecodableRequest:
        return True
    return False


@pytest.mark.slow
async def test_an_engine_that_forgets_a_request_is_reported() -> None:
    command = scripted_command("--null-step-ms=2", proc=FORGETS_WHAT_IT_CANNOT_SERVE)
    report = await check(command, only="an empty prompt", answer_limit_s=1.0, exit_limit_s=0.1)
    (finding,) = report.failures
    assert (finding.group, finding.promise) == ("faults", "an empty prompt")
    assert finding.why == "no answer within 3 s"


@pytest.mark.slow
async def test_an_engine_that_does_not_end_is_reported() -> None:
    command = scripted_command("--null-step-ms=2", proc=IS_DEAF_TO_SIGNALS)
    report = await check(command, only="SIGTERM while idle", exit_limit_s=0.5)
    (finding,) = report.failures
    assert finding.why == "it still runs after 0.5 s"


async def test_a_command_that_does_not_start_is_one_finding() -> None:
    report = await check(exits(1))
    (finding,) = report.findings
    assert finding.why == "it has ended (exit status 1): no such model"


@pytest.mark.slow
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = engine_command("--null-step-ms=2", ADDRESS)
    assert main(["--only=calls", "--", *command]) == 0
    shown = capsys.readouterr().out
    assert "ok      calls    a call of a method that does not exist" in shown
    assert shown.endswith("start: 1 of 1 kept\ncalls: 3 of 3 kept\n")
    assert main(["--summary", "--", *exits(1)]) == 2
    assert capsys.readouterr().out == "start: 0 of 1 kept\n"


@pytest.mark.slow
def test_one_that_is_to_start_only_is_asked_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--only=start", "--", *engine_command(ADDRESS)]) == 0
    assert capsys.readouterr().out.endswith("\nstart: 1 of 1 kept\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only=nonsense", "--", "engine"],
            "no promise has 'nonsense' in its group or its words: the groups are start, serving,"
            " calls, faults, ends, and --list shows all",
        ),
        (["--start-limit=nan", "--", "engine"], "start_limit_s must be above 0, got nan"),
        (["--answer-limit=0", "--", "engine"], "answer_limit_s must be above 0, got 0.0"),
        (["--exit-limit=-1", "--", "engine"], "exit_limit_s must be above 0, got -1.0"),
        (
            ["--", "/no/such/program"],
            "cannot run '/no/such/program': [Errno 2] No such file or directory:"
            " '/no/such/program'",
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"check_engine: {message}\n")


def test_every_promise_is_listed_and_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(WIRE_FAULTS) + 16
    for line in lines:
        check_is_known(line.replace(": ", " ", 1))


def test_without_a_command_it_says_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "[OPTION]... -- COMMAND..." in capsys.readouterr().err


INTERRUPTED_IMPORT = """
import runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "trio":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = ["check_engine", "--list"]
runpy.run_module("trio_engine.testing.check_engine", run_name="__main__")
"""


def test_ctrl_c_during_the_imports_ends_it_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_the_engine_too(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    news = tmp_path / "news"
    os.mkfifo(news)
    engine = f"import os, time; open({str(news)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            process = await nursery.start(
                partial(
                    trio.run_process,
                    [
                        *(sys.executable, "-m", "trio_engine.testing.check_engine", "--"),
                        *(sys.executable, "-c", engine),
                    ],
                    check=False,
                    capture_stderr=True,
                )
            )
            # Opening it waits for the engine to do so.
            told = await trio.to_thread.run_sync(news.read_text, abandon_on_cancel=True)
            process.send_signal(number)
        assert process.returncode == status
        await wait_ended(int(told))


@pytest.mark.slow
async def test_an_engine_may_be_told_a_port_of_tcp() -> None:
    command = engine_command(
        *("--null-step-ms=2", "--headless", "--data-parallel-address=127.0.0.1"),
        "--data-parallel-rpc-port={port}",
    )
    under_check = EngineUnderCheck(command=command, is_headless=True)
    with trio.fail_after(TEST_TIMEOUT_S):
        report = await check_engine(under_check, only="calls")
    assert report.is_ok, report.table()


def test_both_places_of_a_command_are_filled_in() -> None:
    filled = fill_in(["run", "--at={handshake}", "{port}"], "tcp://127.0.0.1:5")
    assert filled == ["run", "--at=tcp://127.0.0.1:5", "5"]


def test_a_report_says_what_is_broken_and_why() -> None:
    findings = [
        Finding(group="one", promise="kept"),
        Finding(group="one", promise="broken", why="because " * 30),
        Finding(group="another", promise="kept"),
    ]
    report = EngineReport(command=["x"], findings=findings)
    assert not report.is_ok
    assert report.failures == [findings[1]]
    assert report.summary() == "one: 1 of 2 kept\nanother: 1 of 1 kept"
    lines = report.table().splitlines()
    assert lines[:2] == ["ok      one      kept", "FAILED  one      broken"]
    assert findings[0].line() == lines[0]
    assert lines[2].strip().startswith("because because")
    assert max(map(len, lines)) <= 100
    assert not EngineReport(command=["x"]).is_ok  # nothing was checked
