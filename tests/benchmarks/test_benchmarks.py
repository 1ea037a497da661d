"""The benchmarks at a small size: what must hold at any speed, so that they cannot rot."""

from __future__ import annotations

import pytest

from tests.benchmarks import (
    burst,
    idle_cpu,
    leaks,
    shutdown_times,
    stalled_client,
    step_phases,
    waiting_memory,
)
from tests.benchmarks.figures import Report, percentile
from tests.benchmarks.stalled_client import MAX_MB, NUM_LOGPROBS, Load

NULL_CASES = shutdown_times.null_cases(step_ms=2.0)
"""All their tokens take 12 s at least, so that no machine is done before a drain of 2 s is over."""


def test_a_figure_over_its_limit_makes_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("title")
    report.add("within", 1.0, "s", below=2.0)
    report.add("without a limit", 5.0, "s")
    assert report.exit_status == 0
    report.add("beyond", 2.0, "s", below=2.0)
    assert report.exit_status == 1
    assert capsys.readouterr().out.splitlines()[-1] == "MISSED: beyond"


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, fraction) for fraction in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]


@pytest.mark.slow
@pytest.mark.parametrize("way", leaks.WAYS)
def test_served_and_aborted_requests_leave_nothing_behind(way: str) -> None:
    assert leaks.main(["--way", way, "--requests", "6000", "--window", "3000"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", NULL_CASES, ids=[case.name for case in NULL_CASES])
async def test_an_engine_that_is_stopped_tells_every_request(case: shutdown_times.Case) -> None:
    await shutdown_times.measure(case)


@pytest.mark.slow
def test_an_engine_without_work_uses_no_processor_time() -> None:
    assert idle_cpu.main(["--executor", "null", "--seconds", "2"]) == 0


@pytest.mark.slow
def test_a_request_that_waits_costs_little_more_than_its_tokens() -> None:
    assert waiting_memory.main(["--requests", "2000"]) == 0


@pytest.mark.slow
def test_streams_go_on_beside_a_burst(capsys: pytest.CaptureFixture[str]) -> None:
    """How fast is for a quiet machine to say."""
    burst.main(["--bursts", "1"])
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("  p99 in the burst / quiet")]
    assert float(line.split()[6]) > 0.0


LOAD = Load("small", num_requests=16, num_tokens=200, step_ms=1.0, limit_bytes=200_000)


@pytest.mark.slow
async def test_a_stalled_client_below_its_limit_loses_nothing() -> None:
    run = await stalled_client.measure(LOAD._replace(limit_bytes=1 << 20), stalls=True)
    assert run.ends == {"length": LOAD.num_requests}
    assert run.growth_mb < MAX_MB


@pytest.mark.slow
async def test_a_stalled_client_that_asked_for_logprobs_loses_its_requests() -> None:
    # Four megabytes: more than any system's buffers and the limit take.
    load = LOAD._replace(logprobs=NUM_LOGPROBS, num_tokens=1000)
    run = await stalled_client.measure(load, stalls=True)
    assert run.ends == {"error": LOAD.num_requests}
    assert run.growth_mb < MAX_MB


@pytest.mark.slow
async def test_a_stalled_client_that_goes_on_asking_costs_bounded_memory() -> None:
    """It gets an end for everything that it asked for, once it reads."""
    run = await stalled_client.measure(LOAD._replace(adds=True), stalls=True)
    assert set(run.ends) == {"length", "error"}
    assert run.growth_mb < MAX_MB


@pytest.mark.slow
def test_the_cost_of_timing_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    # Processor time is counted in steps of 10 ms, of which 5,000 tokens take some on any machine.
    step_phases.main(["--turns=1", "--runs=1", "--requests=10"])
    shown = capsys.readouterr().out
    for name in ("engine's processor time", "its bookkeeping", "bookkeeping with a trace"):
        (line,) = [line for line in shown.splitlines() if name in line]
        assert float(line.split()[-2]) > 0
