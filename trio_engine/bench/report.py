"""What a benchmark prints and keeps: tables, and all figures as JSON.

Pure.
"""

from __future__ import annotations

import math
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine import __version__
from trio_engine.bench.figures import Comparison, LoadFigures, Pair

if TYPE_CHECKING:
    from collections.abc import Sequence


NAMED_PACKAGES = ("trio", "pyzmq", "msgspec", "torch")
"""Whose versions move the figures."""


def installed_versions() -> dict[str, str]:
    """Versions of this package, of Python and of ``NAMED_PACKAGES``, without importing them."""
    found = {"trio_engine": __version__, "python": platform.python_version()}
    for name in NAMED_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # an engine without a model needs no torch
    return found


class BenchReport(msgspec.Struct, kw_only=True):
    """One call of ``trio-engine bench``.

    Attributes:
        command: which of its commands.
        engines: the commands that ran the engines.
        start_s: of each, from its start until it was ready.
        num_cores: of the machine.
        versions: of this package, of Python and of what matters beside them, as installed here;
            an engine of another make has its own.
        platform: system and machine.
        stopped_early: whether something ended it before all runs were done.
        load_averages: of the machine, of the last minute, before and after.
        figures: of every complete run, in order; empty for a comparison.
        comparisons: one for each workload that has a complete pair.
    """

    command: str
    engines: list[list[str]]
    start_s: list[float] = msgspec.field(default_factory=list)
    num_cores: int = msgspec.field(default_factory=lambda: os.cpu_count() or 1)
    versions: dict[str, str] = msgspec.field(default_factory=installed_versions)
    platform: str = msgspec.field(default_factory=platform.platform)
    stopped_early: bool = False
    load_averages: list[float] = msgspec.field(default_factory=lambda: [os.getloadavg()[0]])
    figures: list[LoadFigures] = msgspec.field(default_factory=list)
    comparisons: list[Comparison] = msgspec.field(default_factory=list)

    @property
    def num_errors(self) -> int:
        """Requests that ended badly."""
        of_runs = sum(one.num_errors for one in self.figures)
        return of_runs + sum(one.num_errors for one in self.comparisons)

    @property
    def is_empty(self) -> bool:
        """Whether no run is complete."""
        return not self.figures and not self.comparisons

    def note_pair(self, comparison: Comparison, pair: Pair) -> None:
        """A pair is complete: it and its comparison are part of the report from now on."""
        comparison.pairs.append(pair)
        if len(comparison.pairs) == 1:
            self.comparisons.append(comparison)

    def note_end(self) -> None:
        """No run follows."""
        self.load_averages.append(os.getloadavg()[0])

    def table(self) -> str:
        """All of it for a terminal."""
        if self.command == "serve":
            text = serve_table(self.figures)
        elif self.command == "step":
            text = step_table(self.figures)
        else:
            text = compare_table(self.comparisons)
        loads = ", ".join(f"{load:.2f}" for load in self.load_averages)
        lines = [text, "", f"{self.num_cores} cores, load average before and after: {loads}"]
        if self.start_s:
            starts = " and ".join(f"{start_s:.2f}" for start_s in self.start_s)
            lines.append(f"engines ready after {starts} s")
        if self.stopped_early:
            lines.append("stopped early: this is what was complete by then")
        if self.num_errors:
            lines.append(f"{self.num_errors} requests ended badly")
        return "\n".join(lines)


def report_to_json(report: BenchReport) -> bytes:
    """All figures, and what the tables derive from them; a ratio that does not exist is null."""
    shown = msgspec.to_builtins(report)
    shown["figures"] = [_run_to_builtins(one) for one in report.figures]
    shown["comparisons"] = [_comparison_to_builtins(one) for one in report.comparisons]
    return msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n"


def _run_to_builtins(one: LoadFigures) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(one)
    for name in ("tokens_per_s", "requests_per_s", "engine_cpu_us_per_token"):
        shown[name] = getattr(one, name)
    if one.steps is not None:
        shown["steps"]["bubble_share"] = one.steps.bubble_share
        for name, phase in one.steps.phases.items():
            shown["steps"]["phases"][name]["mean_s"] = phase.mean_s
    return shown


def _comparison_to_builtins(one: Comparison) -> dict[str, Any]:
    pairs = [
        {
            "first": _run_to_builtins(pair.first),
            "second": _run_to_builtins(pair.second),
            "ratio": pair.ratio,
        }
        for pair in one.pairs
    ]
    return {"workload": one.workload, "pairs": pairs, "median_ratio": one.median_ratio}


def serve_table(figures: Sequence[LoadFigures]) -> str:
    """Latencies and throughput, a row for each load."""
    header = [
        "load",
        "requests",
        "tokens/s",
        "requests/s",
        *("first token,\np50 ms", "\np90", "\np99"),
        *("inter-token,\np50 ms", "\np90", "\np99"),
        "client,\ncores",
    ]
    return table(header, [_serve_row(one) for one in figures])


def _serve_row(one: LoadFigures) -> list[str]:
    times = [
        f"{1000 * value:.2f}"
        for found in (one.first_token, one.inter_token)
        for value in (found.p50_s, found.p90_s, found.p99_s)
    ]
    how = f"{one.concurrency} at once" if one.rate is None else f"{one.rate:g} per s"
    return [
        how,
        str(one.num_requests),
        f"{one.tokens_per_s:,.0f}",
        f"{one.requests_per_s:,.1f}",
        *times,
        f"{one.client_cpu_share:.2f}",
    ]


def step_table(figures: Sequence[LoadFigures]) -> str:
    """What the engine itself costs, and the mean of each phase of its steps."""
    phases = list(next((one.steps.phases for one in figures if one.steps is not None), {}))
    header = [
        "load",
        "tokens/s",
        "steps",
        "engine CPU\nus/token",
        "bubble",
        *(f"{name},\nus" for name in phases),
    ]
    rows = []
    for one in figures:
        cells = [one.workload, f"{one.tokens_per_s:,.0f}"]
        if one.steps is None:
            cost = f"{one.engine_cpu_us_per_token:.1f}"
            rows.append([*cells, "", cost, "", *[""] * len(phases)])
            continue
        steps = one.steps
        means = [f"{1e6 * steps.phases[name].mean_s:.1f}" for name in phases]
        rows.append(
            [
                *cells,
                str(steps.num_steps),
                f"{one.engine_cpu_us_per_token:.1f}",
                f"{steps.bubble_share:.1%}",
                *means,
            ]
        )
    return table(header, rows)


def compare_table(comparisons: Sequence[Comparison]) -> str:
    """Medians of both engines, and the ratio of their tokens per second pair by pair."""
    header = [
        "load",
        *("tokens/s,\nfirst", "\nsecond"),
        "median\nratio",
        "ratio of\neach pair",
        *("inter-token p50 p99,\nfirst, ms", "\nsecond"),
        *("CPU us/token,\nfirst", "\nsecond"),
    ]
    return table(header, [_compare_row(one) for one in comparisons])


def _compare_row(one: Comparison) -> list[str]:
    speeds = one.median(lambda found: found.tokens_per_s)
    middles = one.median(lambda found: 1000 * found.inter_token.p50_s)
    tails = one.median(lambda found: 1000 * found.inter_token.p99_s)
    costs = one.median(lambda found: found.engine_cpu_us_per_token)
    return [
        one.workload,
        *(f"{speed:,.0f}" for speed in speeds),
        _ratio(one.median_ratio),
        " ".join(_ratio(ratio) for ratio in one.ratios),
        *(f"{middle:.2f} {tail:.2f}" for middle, tail in zip(middles, tails, strict=True)),
        *(f"{cost:.1f}" for cost in costs),
    ]


def _ratio(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be, the first to the left and numbers to the right.

    A header may have several lines.
    """
    heads = [title.split("\n") for title in header]
    height = max(map(len, heads))
    lines = [[head[line] if line < len(head) else "" for head in heads] for line in range(height)]
    cells = [*lines, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
