"""``trio-engine bench``: what a user sees of it, with real engines of the null executor."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.process.stand_ins import exits, exits_after_ready
from trio_engine.bench.report import BenchReport
from trio_engine.cli import bench

if TYPE_CHECKING:
    from pathlib import Path

NULL_ENGINE = [sys.executable, "-m", "trio_engine.engine", "--executor=null", "--owner-fd=0"]
HANDSHAKE = "--handshake-address={handshake}"


def report_in(path: Path) -> BenchReport:
    return msgspec.json.decode(path.read_bytes(), type=BenchReport)


def test_step_tells_what_the_engine_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    options = ["--workloads=conc32", "--scale=0.13", "--repeat=1", f"--json={path}"]
    assert bench.run(["step", *options, "--null-step-ms=1"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "bubble" in shown.out.splitlines()[0]
    report = report_in(path)
    assert (report.command, len(report.load_averages)) == ("step", 2)
    (one,) = report.figures
    assert (one.num_requests, one.num_errors, one.num_tokens) == (33, 0, 33 * 64)
    # What the load was too slow to take one by one came in one output.
    assert 0 < one.inter_token.count <= 33 * 63
    assert one.steps is not None
    # 32 at once and then the last one by itself.
    assert 128 <= one.steps.num_steps <= 160
    assert one.steps.device_busy_s >= 0.128
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
    assert report.engines == [[*NULL_ENGINE, HANDSHAKE]]
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
    (comparison,) = report_in(path).comparisons
    assert len(comparison.pairs) == 2
    assert comparison.median_ratio > 1  # the second one's steps take 5 ms more
    assert f"{comparison.median_ratio:.2f}" in capsys.readouterr().out


@pytest.mark.slow
def test_requests_that_end_badly_are_counted_and_make_the_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = ["--executor=null", "--max-num-seqs=1", "--max-waiting-requests=1"]
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
        (["serve", "--json=/"], 2, "cannot write to '/'"),
        (["serve", "--concurrency=1,x"], 2, "concurrency must be numbers, got '1,x'"),
        (["serve", "--rate=-1"], 2, "rate must be above 0 and finite, got -1.0"),
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


def test_an_engine_that_does_not_start_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["serve", "--", *exits(3)]) == 1
    assert "the engine did not start (exit status 3)" in capsys.readouterr().err


def test_why_another_program_did_not_start_is_its_last_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.run(["serve", "--", "sh", "-c", "echo no such model >&2; exit 3"]) == 1
    assert "did not start (exit status 3): no such model" in capsys.readouterr().err


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


DIES_LATER = """
import sys
from trio_engine.cli.engine import run
from trio_engine.executor.null import NullExecutor

def collect(self):
    raise MemoryError("made up")

NullExecutor.collect = collect
sys.exit(run(sys.argv[1:]))
"""


def test_an_engine_that_dies_under_load_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", DIES_LATER, "--executor=null", "--owner-fd=0", HANDSHAKE]
    assert bench.run(["serve", "--num-requests=4", "--", *command]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("trio-engine: the engine ")
