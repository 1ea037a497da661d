"""Curves of a benchmark: how latencies are distributed, and throughput over concurrency.

Pure but for ``write_plot``, which alone needs matplotlib, the extra ``bench``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from trio_engine.bench.figures import Distribution, LoadFigures
    from trio_engine.bench.report import BenchReport

SIZE_INCHES = (15.0, 4.5)


class Curve(msgspec.Struct, frozen=True):
    """A line of a chart. ``label`` is empty if it is the only one."""

    label: str
    x: list[float]
    y: list[float]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Curves in one frame, with a logarithmic x axis."""

    x_label: str
    y_label: str
    curves: list[Curve]


def charts_of(report: BenchReport) -> list[Chart]:
    """What a report has to show: two distributions, and the throughput."""
    runs = list(_labelled(report))
    return [
        _distributions("first token, ms", [(label, one.first_token) for label, one in runs]),
        _distributions("inter-token time, ms", [(label, one.inter_token) for label, one in runs]),
        Chart(
            x_label="requests at once",
            y_label="tokens/s",
            curves=list(_throughput(report)),
        ),
    ]


def check_can_plot(path: Path) -> None:
    """Tells before the work what ``write_plot`` would tell after it.

    Raises:
        ConfigError: matplotlib is missing, or the file is to be something else than a PNG.
    """
    if path.suffix != ".png":
        raise ConfigError(f"--plot writes a .png file, got {str(path)!r}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'trio-engine[bench]'")


def write_plot(report: BenchReport, path: Path) -> None:
    """Draws the charts of a report side by side.

    Raises:
        ConfigError: as ``check_can_plot``.
    """
    check_can_plot(path)
    from matplotlib.figure import Figure

    charts = charts_of(report)
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    for axes, chart in zip(figure.subplots(1, len(charts)), charts, strict=True):
        _draw(axes, chart)
    figure.savefig(path)


def _draw(axes: Any, chart: Chart) -> None:
    for curve in chart.curves:
        axes.plot(
            curve.x, curve.y, label=curve.label or None, marker="." if len(curve.x) < 50 else ""
        )
    axes.set_xscale("log")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(visible=True, alpha=0.3)
    if any(curve.label for curve in chart.curves):
        axes.legend()


def _labelled(report: BenchReport) -> list[tuple[str, LoadFigures]]:
    """All runs, each named by what differs."""
    runs = [(_name_of(one, report), one) for one in report.figures]
    for comparison in report.comparisons:
        for pair in comparison.pairs:
            runs.append((f"{comparison.workload}, first", pair.first))
            runs.append((f"{comparison.workload}, second", pair.second))
    return list(dict(runs).items())  # the last run of a name stands for the others


def _name_of(one: LoadFigures, report: BenchReport) -> str:
    if report.command != "serve":
        return one.workload
    return f"{one.concurrency} at once" if one.rate is None else f"{one.rate:g} per s"


def _distributions(x_label: str, runs: list[tuple[str, Distribution]]) -> Chart:
    curves = []
    for label, found in runs:
        last = len(found.quantiles) - 1
        if last > 0:
            x = [1000 * time_s for time_s in found.quantiles]
            curves.append(Curve(label, x, [number / last for number in range(last + 1)]))
    return Chart(x_label=x_label, y_label="share of them", curves=curves)


def _throughput(report: BenchReport) -> list[Curve]:
    groups = {"": report.figures}
    pairs = [pair for comparison in report.comparisons for pair in comparison.pairs]
    if pairs:
        groups = {"first": [p.first for p in pairs], "second": [p.second for p in pairs]}
    return [Curve(label, *_over_concurrency(group)) for label, group in groups.items()]


def _over_concurrency(group: list[LoadFigures]) -> tuple[list[float], list[float]]:
    speeds: dict[int, list[float]] = {}
    for one in group:
        if one.concurrency is not None:
            speeds.setdefault(one.concurrency, []).append(one.tokens_per_s)
    numbers = sorted(speeds)
    return [float(number) for number in numbers], [max(speeds[number]) for number in numbers]
