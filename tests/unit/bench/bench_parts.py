"""Made-up figures for tables and curves."""

from __future__ import annotations

from array import array

import msgspec

from trio_engine.bench.figures import Comparison, Distribution, LoadFigures, Pair, distribution_of
from trio_engine.core.statistics import PhaseTime, StepStatistics


def times(*values_ms: float) -> Distribution:
    return distribution_of(array("d", [value / 1000 for value in values_ms]))


def make_figures(
    workload: str = "conc32", *, tokens_per_s: float = 1000.0, concurrency: int = 32
) -> LoadFigures:
    return LoadFigures(
        workload=workload,
        concurrency=concurrency,
        rate=None,
        num_requests=20,
        num_errors=0,
        num_tokens=int(2 * tokens_per_s),
        duration_s=2.0,
        first_token=times(10, 20, 30),
        inter_token=times(1, 2, 3, 4),
        whole=times(100, 200),
        engine_cpu_s=0.1,
        client_cpu_share=0.25,
        steps=StepStatistics(
            num_steps=100,
            device_busy_s=1.8,
            bubble_s=0.2,
            phases={"plan": PhaseTime(num_timed=10, total_s=50e-6)},
        ),
    )


def make_comparison(workload: str, *speeds: tuple[float, float]) -> Comparison:
    pairs = [
        Pair(make_figures(tokens_per_s=first), make_figures(tokens_per_s=second))
        for first, second in speeds
    ]
    return Comparison(workload=workload, pairs=pairs)


def with_errors(figures: LoadFigures) -> LoadFigures:
    return msgspec.structs.replace(figures, num_errors=3)
