"""Tables of benchmarks, their JSON, and the counter on a terminal."""

from __future__ import annotations

import io
import platform

import msgspec
import pytest

from tests.unit.bench.bench_parts import make_comparison, make_figures, with_errors
from trio_engine.bench.figures import Comparison, Recorder, SeenOutput
from trio_engine.bench.progress import CounterLine
from trio_engine.bench.report import BenchReport, report_to_json, table


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert table(["name", "much\nlonger", "n"], [["ab", "1", "23"], ["c", "456", ""]]) == (
        "name    much   n\n      longer\nab         1  23\nc        456"
    )


def cells_of(report: BenchReport, start: str) -> list[str]:
    (line,) = [line for line in report.table().splitlines() if line.startswith(start)]
    return line.removeprefix(start).split()


def test_a_load_on_an_engine_is_a_row_of_latencies() -> None:
    report = BenchReport(command="serve", engines=[["run"]], figures=[make_figures()])
    shown = cells_of(report, "32 at once")
    latencies = ["20.00", "28.00", "29.80", "2.50", "3.70", "3.97"]
    assert shown == ["20", "1,000", "10.0", *latencies, "0.25"]


def test_a_measured_engine_is_a_row_of_costs() -> None:
    report = BenchReport(command="step", engines=[["run"]], figures=[make_figures()])
    assert cells_of(report, "conc32") == ["1,000", "100", "50.0", "10.0%", "5.0"]
    silent = msgspec.structs.replace(make_figures(), steps=None)
    report.figures = [silent]
    assert cells_of(report, "conc32") == ["1,000", "50.0"]


def test_a_comparison_is_a_row_of_ratios() -> None:
    comparisons = [make_comparison("single", (100, 200), (300, 100), (300, 200))]
    report = BenchReport(command="compare", engines=[["a"], ["b"]], comparisons=comparisons)
    shown = cells_of(report, "single")
    assert shown[:6] == ["300", "200", "1.50", "0.50", "3.00", "1.50"]
    assert "ready after" not in report.table()
    report.start_s += [2.0, 41.25]
    assert "engines ready after 2.00 and 41.25 s" in report.table()


def test_the_machine_and_bad_ends_are_told() -> None:
    report = BenchReport(command="step", engines=[["run"]], figures=[make_figures()])
    report.note_end()
    assert f"{report.num_cores} cores, load average before and after: " in report.table()
    assert "ended badly" not in report.table()
    report.figures.append(with_errors(make_figures()))
    assert report.table().endswith("\n3 requests ended badly")


@pytest.mark.parametrize("command", ["serve", "compare"])
def test_json_holds_all_of_a_report(command: str) -> None:
    report = BenchReport(command=command, engines=[["run"]])
    if command == "serve":
        report.figures.append(make_figures())
    else:
        report.comparisons.append(make_comparison("single", (1, 2)))
    encoded = report_to_json(report)
    assert msgspec.json.decode(encoded, type=BenchReport) == report


def test_json_has_what_tables_derive_and_the_versions() -> None:
    report = BenchReport(
        command="compare",
        engines=[["a"], ["b"]],
        figures=[make_figures()],
        comparisons=[make_comparison("single", (300, 100), (300, 0), (300, 200))],
    )
    found = msgspec.json.decode(report_to_json(report))
    (one,) = found["figures"]
    assert (one["tokens_per_s"], one["requests_per_s"]) == (1000, 10)
    assert one["engine_cpu_us_per_token"] == pytest.approx(50)
    assert one["steps"]["bubble_share"] == pytest.approx(0.1)
    assert one["steps"]["phases"]["plan"]["mean_s"] == pytest.approx(5e-6)
    (comparison,) = found["comparisons"]
    assert [pair["ratio"] for pair in comparison["pairs"]] == [3.0, None, 1.5]
    assert comparison["median_ratio"] == 2.25
    assert comparison["pairs"][0]["second"]["tokens_per_s"] == 100
    assert found["versions"].keys() >= {"trio_engine", "python", "trio", "pyzmq", "msgspec"}
    assert found["versions"]["python"] == platform.python_version()
    assert found["platform"] == platform.platform()


def test_a_pair_without_a_ratio_is_a_dash() -> None:
    comparisons = [make_comparison("single", (300, 0), (300, 100)), make_comparison("x", (1, 0))]
    report = BenchReport(command="compare", engines=[["a"], ["b"]], comparisons=comparisons)
    assert cells_of(report, "single")[2:5] == ["3.00", "-", "3.00"]
    assert cells_of(report, "x")[2:4] == ["-", "-"]


def test_a_comparison_is_part_of_a_report_from_its_first_pair_on() -> None:
    report = BenchReport(command="compare", engines=[["a"], ["b"]])
    (pair,) = make_comparison("single", (1, 2)).pairs
    comparison = Comparison(workload="single", pairs=[])
    assert report.is_empty
    for number in (1, 2):
        report.note_pair(comparison, pair)
        assert report.comparisons == [Comparison(workload="single", pairs=[pair] * number)]
    assert not report.is_empty


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_far_it_is_and_in_the_end_nothing() -> None:
    terminal = Terminal()
    line = CounterLine(terminal)
    recorder = Recorder([str(number) for number in range(10)])
    recorder.take([SeenOutput("3", [], finish_reason=1)], 1.0)
    line.of("conc32", 10)(recorder)
    assert "\r\x1b[Kconc32: 1/10 requests, 0 tokens/s" in terminal.getvalue()
    line.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_what_is_no_terminal_sees_no_progress() -> None:
    stream = io.StringIO()
    line = CounterLine(stream)
    line.of("conc32", 10)(Recorder(["0"]))
    line.note("starting")
    line.clear()
    assert stream.getvalue() == ""
