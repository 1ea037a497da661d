"""``trio-engine bench``: what a user sees of it, with real engines of the null executor."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from tests.process.processes import wait_ended
from tests.process.stand_ins import exits, exits_after_ready
from trio_engine.bench.report import BenchReport
from trio_engine.cli import bench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NULL_ENGINE = [sys.executable, "-m", "trio_engine.engine", "--executor=null", "--owner-fd=0"]
HANDSHAKE = "--handshake-address={handshake}"
TEST_TIMEOUT_S = 100.0


def report_in(path: Path) -> BenchReport:
    return msgspec.json.decode(path.read_bytes(), type=BenchReport)


def test_step_tells_what_the_engine_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    options = ["--workloads=conc32", "--scale=0.13", "--repeat=1", f"--json={path}"]
    assert bench.run(["step", *options, "--null-step-ms=5"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "bubble" in shown.out.splitlines()[0]
    report = report_in(path)
    assert (report.command, len(report.load_averages)) == ("step", 2)
    (start_s,) = report.start_s
    assert start_s > 0
    (one,) = report.figures
    assert (one.num_requests, one.num_errors, one.num_tokens) == (33, 0, 33 * 64)
    # What the load was too slow to take one by one came in one output.
    assert 0 < one.inter_token.count <= 33 * 63
    assert one.steps is not None
    # 32 at once and then the last one by itself, or a few more steps if they come one by one.
    assert 128 <= one.steps.num_steps <= one.num_tokens / 4
    assert one.steps.device_busy_s >= 128 * 0.005
    assert 0 < one.steps.bubble_share < 1
    assert set(one.steps.phases) >= {"plan", "wait", "forward", "settle", "encode", "send"}


def test_serve_loads_an_engine_by_its_command_with_each_concurrency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    options = ["--concurrency=1,4", "--num-requests=8", "--output-tokens=4", f"--json={path}"]
    assert bench.run(["serve", *options, "--", *NULL_ENGINE, HANDSHAKE]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in rows if " at once" in line] == ["1 at once", "4 at once"]
    report = report_in(path)
    assert (report.engines, len(report.start_s)) == ([[*NULL_ENGINE, HANDSHAKE]], 1)
    for one in report.figures:
        assert (one.num_requests, one.num_tokens, one.num_errors) == (8, 32, 0)
        assert one.first_token.count == one.whole.count == 8
        assert one.whole.p50_s >= one.first_token.p50_s > 0


@pytest.mark.slow
def test_serve_at_a_rate_sends_on_time_whatever_the_engine_does(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    lengths = ["--mix", "--prompt-tokens=20", "--output-tokens=10", "--num-requests=40"]
    engine = ["--executor=null", "--null-step-ms=1", "--max-num-seqs=2"]
    assert bench.run(["serve", "--rate=100", *lengths, f"--json={path}", *engine]) == 0
    (one,) = report_in(path).figures
    assert (one.num_requests, one.concurrency, one.rate) == (40, None, 100.0)
    # Two at once are too few for this rate: those that wait show, as a closed loop would hide.
    assert one.first_token.max_s > 4 * one.first_token.quantiles[0]


@pytest.mark.slow
def test_compare_runs_two_engines_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    first = shlex.join([*NULL_ENGINE, HANDSHAKE])
    second = shlex.join(
        [
            *(*NULL_ENGINE, "--null-step-ms=5", "--headless"),
            *("--data-parallel-address=127.0.0.1", "--data-parallel-rpc-port={port}"),
        ]
    )
    options = ["--workloads=conc32", "--scale=0.125", "--pairs=2", "--headless", f"--json={path}"]
    assert bench.run(["compare", f"--first={first}", f"--second={second}", *options]) == 0
    report = report_in(path)
    assert len(report.start_s) == 2
    (comparison,) = report.comparisons
    assert len(comparison.pairs) == 2
    assert comparison.median_ratio > 1  # the second one's steps take 5 ms more
    assert f"{comparison.median_ratio:.2f}" in capsys.readouterr().out


@pytest.mark.slow
def test_requests_that_end_badly_are_counted_and_make_the_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Steps so long that the others arrive while the first one runs, on a slow machine too.
    places = ["--max-num-seqs=1", "--max-waiting-requests=1"]
    engine = ["--executor=null", "--null-step-ms=100", *places]
    options = ["--concurrency=8", "--num-requests=16", "--output-tokens=4"]
    assert bench.run(["serve", *options, *engine]) == 1
    assert "requests ended badly" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["step", "--workloads=nonsense"], 2, "no workload 'nonsense': there are single, "),
        (["step", "--repeat=0"], 2, "repeat must be 1 or more, got 0"),
        (["compare", "--first=x", "--second=y", "--pairs=0"], 2, "pairs must be 1 or more, got 0"),
        (["step", "--max-num-seqs=0"], 2, "max_num_seqs must be 1 or more, got 0"),
        (["step", "--scale=0"], 2, "scale must be above 0 and at most 1000, got 0.0"),
        (["step", "--scale=nan"], 2, "scale must be above 0 and at most 1000, got nan"),
        (["serve", "--num-requests=0"], 2, "num_requests must be 1 to 10000000, got 0"),
        (["serve", "--prompt-tokens=nan"], 2, "prompt_tokens must be 1 to 10000000, got nan"),
        (["serve", "--seed=-1"], 2, "seed must be 0 or more, got -1"),
        (["compare", "--first=", "--second=x"], 2, "an engine command is empty"),
        (["compare", "--first='", "--second=x"], 2, "cannot parse the command "),
        (["serve", "--stall-timeout=0"], 2, "stall_timeout must be above 0, got 0.0"),
        (["step", "--stall-timeout=nan"], 2, "stall_timeout must be above 0, got nan"),
        (["serve", "--json=/"], 2, "cannot write to '/'"),
        (["serve", "--concurrency=1,x"], 2, "concurrency must be numbers, got '1,x'"),
        (["serve", "--rate=-1"], 2, "rate must be above 0 and finite, got -1.0"),
        (["serve", "--rate=1", "--concurrency=4"], 2, "rate and concurrency are two kinds of load"),
        (["serve", "--headless"], 2, "headless is about the engine command behind --"),
        (["serve", "--json=/no/such/folder/x"], 2, "cannot write to '/no/such/folder/x'"),
        (["serve", "--plot=curves.pdf"], 2, "--plot writes a .png file, got 'curves.pdf'"),
        (["step", "--", "engine"], 2, "only serve takes an engine command behind --"),
        (["serve", "--executor=null", "--", "engine"], 2, "with an engine command its options"),
        (["serve", "--", "/no/such/program"], 1, "cannot run '/no/such/program'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(arguments) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"trio-engine: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [exits(3), ["sh", "-c", "echo no such model >&2; exit 3"]], ids=["ours", "another"]
)
def test_why_an_engine_did_not_start_is_its_last_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(["serve", "--", *command]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ("trio-engine: the engine did not start (exit status 3): no such model\n")


def test_an_engine_that_leaves_between_two_loads_is_noticed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [*exits_after_ready(0), "--handshake-address", "{handshake}"]
    assert bench.run(["serve", "--", *command]) == 1
    assert "the engine has left (exit status 0" in capsys.readouterr().err


def test_a_few_requests_are_enough_for_the_smallest_scale(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = ["--workloads=single", "--scale=0.001", "--repeat=1", "--null-step-ms=0"]
    assert bench.run(["step", *options, f"--json={path}"]) == 0
    assert report_in(path).figures[0].num_requests == 1


SPOILT = """
import os, sys, time
from trio_engine.cli.engine import run
from trio_engine.executor.null import NullExecutor

num_good = {num_good}

def launch(self, plan, usual=NullExecutor.launch):
    global num_good
    num_good -= len(plan.new_rows)
    if num_good < 0:
        {what}
    usual(self, plan)

NullExecutor.launch = launch
sys.exit(run(sys.argv[1:]))
"""
DIES = 'raise MemoryError("made up")'
HANGS = "time.sleep(600)"


TWO_LOADS = ["--num-requests=4", "--output-tokens=4", "--concurrency=1,2"]
NUM_IN_FIRST_LOAD = 5
"""With the request before it that warms up."""


def spoilt_engine(what: str, *options: str, num_good: int = NUM_IN_FIRST_LOAD) -> list[str]:
    """An engine that goes wrong after some good requests."""
    program = SPOILT.format(what=what, num_good=num_good)
    return [sys.executable, "-c", program, "--executor=null", "--exit-grace=0.2", *options]


def assert_first_load_alone(shown: str, path: Path) -> None:
    """A table and a file of what was complete, and both say that it is not all."""
    rows = [line[:9] for line in shown.splitlines() if " at once" in line]
    assert rows == ["1 at once"]
    assert "stopped early" in shown
    report = report_in(path)
    assert report.stopped_early
    assert [one.concurrency for one in report.figures] == [1]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (DIES, "trio-engine: the engine "),
        pytest.param(
            HANGS,
            "trio-engine: the engine runs, but gave no answer for 3 s (--stall-timeout)",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dies", "hangs"],
)
def test_what_is_complete_when_an_engine_fails_is_shown_and_kept_before_the_error(
    what: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    options = [*TWO_LOADS, f"--json={path}", "--stall-timeout=3"]
    assert bench.run(["serve", *options, "--", *spoilt_engine(what, HANDSHAKE)]) == 1
    shown = capsys.readouterr()
    assert_first_load_alone(shown.out, path)
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == 1


def test_an_engine_that_dies_in_the_first_load_is_an_error_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = spoilt_engine(DIES, HANDSHAKE, num_good=0)
    assert bench.run(["serve", *TWO_LOADS, "--", *command]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("trio-engine: the engine ")


@pytest.mark.slow
def test_pairs_that_are_complete_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    first = shlex.join([*NULL_ENGINE, HANDSHAKE])
    second = shlex.join(spoilt_engine(DIES, HANDSHAKE))
    options = ["--workloads=real1,real8", "--pairs=2", f"--json={path}"]
    assert bench.run(["compare", f"--first={first}", f"--second={second}", *options]) == 1
    (comparison,) = report_in(path).comparisons
    assert (comparison.workload, len(comparison.pairs)) == ("real1", 2)
    assert "stopped early" in capsys.readouterr().out


@asynccontextmanager
async def bench_in_second_load(tmp_path: Path, *engine_options: str) -> AsyncIterator[trio.Process]:
    """A bench whose engine hangs in the second load. At the end that engine must be gone."""
    news = tmp_path / "news"
    os.mkfifo(news)
    tell = f"open({str(news)!r}, 'w').write(str(os.getpid())); {HANGS}"
    process = await trio.lowlevel.open_process(
        [
            *(sys.executable, "-m", "trio_engine", "bench", "serve", *TWO_LOADS),
            *(f"--json={tmp_path / 'figures.json'}", "--"),
            *spoilt_engine(tell, HANDSHAKE, *engine_options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        with trio.fail_after(TEST_TIMEOUT_S):
            # Opening it waits for the engine to do so.
            told = await trio.to_thread.run_sync(news.read_text, abandon_on_cancel=True)
            yield process
            await wait_ended(int(told))
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                await stream.aclose()


async def read_all(stream: trio.abc.ReceiveStream | None) -> str:
    assert stream is not None
    return b"".join([chunk async for chunk in stream]).decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
async def test_a_signal_ends_the_engine_and_what_is_complete_is_shown_and_kept(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    async with bench_in_second_load(tmp_path) as process:
        process.send_signal(number)
        shown = await read_all(process.stdout)
        assert await read_all(process.stderr) == ""
        assert await process.wait() == status
    assert_first_load_alone(shown, tmp_path / "figures.json")


@pytest.mark.slow
async def test_an_engine_that_watches_its_owner_ends_when_the_bench_is_killed(
    tmp_path: Path,
) -> None:
    async with bench_in_second_load(tmp_path, "--owner-fd=0") as process:
        process.kill()
