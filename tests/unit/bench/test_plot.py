"""What is drawn, and that it is."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from tests.unit.bench.bench_parts import make_comparison, make_figures
from trio_engine.bench.figures import Distribution
from trio_engine.bench.plot import charts_of, check_can_plot, write_plot
from trio_engine.bench.report import BenchReport
from trio_engine.errors import ConfigError


def served(*runs: tuple[int, float]) -> BenchReport:
    figures = [make_figures("serve", concurrency=n, tokens_per_s=speed) for n, speed in runs]
    return BenchReport(command="serve", engines=[["run"]], figures=figures)


def test_a_curve_of_latencies_rises_from_the_shortest_to_the_longest() -> None:
    first_token, inter_token, _ = charts_of(served((1, 100), (8, 500)))
    assert [curve.label for curve in first_token.curves] == ["1 at once", "8 at once"]
    for chart, shortest_ms, longest_ms in ((first_token, 10, 30), (inter_token, 1, 4)):
        curve = chart.curves[0]
        assert (curve.x[0], curve.x[-1]) == pytest.approx((shortest_ms, longest_ms))
        assert (curve.y[0], curve.y[50], curve.y[-1]) == (0.0, 0.5, 1.0)
        assert curve.x == sorted(curve.x)


def test_throughput_is_drawn_over_concurrency_in_order() -> None:
    *_, throughput = charts_of(served((8, 500), (1, 100), (32, 900)))
    (curve,) = throughput.curves
    assert (curve.label, curve.x, curve.y) == ("", [1, 8, 32], [100, 500, 900])


def test_a_comparison_has_curves_of_both() -> None:
    comparisons = [make_comparison("conc32", (100, 50), (200, 80))]
    report = BenchReport(command="compare", engines=[["a"], ["b"]], comparisons=comparisons)
    first_token, _, throughput = charts_of(report)
    assert [curve.label for curve in first_token.curves] == ["conc32, first", "conc32, second"]
    shown = {curve.label: (curve.x, curve.y) for curve in throughput.curves}
    assert shown == {"first": ([32], [200]), "second": ([32], [80])}


def test_a_load_at_a_rate_has_latencies_only() -> None:
    one = msgspec.structs.replace(make_figures("serve"), concurrency=None, rate=2.5)
    report = BenchReport(command="serve", engines=[["run"]], figures=[one])
    first_token, _, throughput = charts_of(report)
    assert [curve.label for curve in first_token.curves] == ["2.5 per s"]
    assert throughput.curves[0].x == []


def test_answers_of_one_token_have_no_curve_between_tokens() -> None:
    one = msgspec.structs.replace(make_figures("churn"), inter_token=Distribution())
    report = BenchReport(command="step", engines=[["run"]], figures=[one])
    assert charts_of(report)[1].curves == []


def test_another_ending_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--plot writes a .png file, got 'curves.pdf'"):
        check_can_plot(Path("curves.pdf"))


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    for action in (check_can_plot, lambda path: write_plot(served((1, 100)), path)):
        with pytest.raises(
            ConfigError, match=r"needs matplotlib: pip install 'trio-engine\[bench\]"
        ):
            action(tmp_path / "curves.png")


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    write_plot(served((1, 100), (8, 500)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
