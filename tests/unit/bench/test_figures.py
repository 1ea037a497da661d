"""What is counted of a load, and what becomes of the counts."""

from __future__ import annotations

from array import array

import pytest

from tests.unit.bench.bench_parts import make_comparison, make_figures
from trio_engine.bench.figures import Distribution, Recorder, SeenOutput, distribution_of
from trio_engine.bench.workload import Workload
from trio_engine.outputs import FinishReason

LENGTH, ERROR = FinishReason.LENGTH, FinishReason.ERROR


def test_a_distribution_says_where_values_lie() -> None:
    found = distribution_of(array("d", [number / 100 for number in range(101)]))
    assert found.count == 101
    assert found.mean_s == pytest.approx(0.5)
    shown = (found.p50_s, found.p90_s, found.p99_s, found.max_s)
    assert shown == pytest.approx((0.5, 0.9, 0.99, 1.0))
    assert found.quantiles == pytest.approx([number / 100 for number in range(101)])


def test_of_no_values_there_is_no_distribution() -> None:
    assert distribution_of(array("d")) == Distribution()


def test_a_recorder_measures_from_arrival_to_first_token_between_outputs_and_to_the_end() -> None:
    recorder = Recorder(["a", "b"])
    recorder.note_arrival(0, 10.0)
    recorder.note_arrival(1, 11.0)
    assert recorder.take([SeenOutput("a", [7])], 10.5) == 0
    assert recorder.take([SeenOutput("a", [7, 8, 9], finish_reason=LENGTH)], 10.75) == 1
    assert recorder.take([SeenOutput("b", [7])], 13.0) == 0
    assert not recorder.is_complete
    assert recorder.take([SeenOutput("b", [], finish_reason=ERROR)], 14.0) == 1
    assert recorder.is_complete
    figures = recorder.figures(
        Workload(name="x", num_requests=2, concurrency=2),
        duration_s=4.0,
        engine_cpu_s=0.001,
        client_cpu_s=1.0,
        steps=None,
    )
    assert (figures.num_requests, figures.num_errors, figures.num_tokens) == (2, 1, 5)
    assert (figures.tokens_per_s, figures.requests_per_s) == (1.25, 0.5)
    assert figures.engine_cpu_us_per_token == pytest.approx(200)
    assert figures.client_cpu_share == 0.25
    assert (figures.first_token.count, figures.first_token.max_s) == (2, 2.0)
    assert (figures.inter_token.count, figures.inter_token.max_s) == (1, 0.25)
    assert (figures.whole.count, figures.whole.max_s) == (2, 3.0)


def test_a_rate_has_no_concurrency() -> None:
    figures = Recorder(["a"]).figures(
        Workload(name="x", num_requests=1, concurrency=4, rate=2.0),
        duration_s=1.0,
        engine_cpu_s=0.0,
        client_cpu_s=0.0,
        steps=None,
    )
    assert (figures.concurrency, figures.rate) == (None, 2.0)


def test_a_comparison_takes_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    comparison = make_comparison("single", (100, 100), (300, 100), (400, 200))
    assert comparison.ratios == [1.0, 3.0, 2.0]
    assert comparison.median_ratio == 2.0
    # Of the speeds themselves the medians are 300 and 100.
    assert comparison.median(lambda found: found.tokens_per_s) == (300, 100)
    assert comparison.num_errors == 0


def test_what_an_engine_costs_is_by_token() -> None:
    assert make_figures(tokens_per_s=500).engine_cpu_us_per_token == pytest.approx(100)
