"""Counts of the core: for people, for front ends' metrics, and as a test oracle.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from trio_engine.core.metrics import RequestMetrics
    from trio_engine.core.scheduler import Scheduler


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """How long one phase of steps took, as far as it was timed."""

    num_timed: int = 0
    total_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """Of one time, 0 if it was never timed."""
        return self.total_s / max(1, self.num_timed)


class StepStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of steps went since the engine's start, or since ``earlier``.

    Attributes:
        num_steps: whose results have come.
        device_busy_s: in which the executor had a plan.
        bubble_s: in which it had none though a request was known and no pause was on.
        phases: by name in the order of ``core.step_phases.StepPhase``. All forward passes are
            timed, and a part of the rest.
    """

    num_steps: int = 0
    device_busy_s: float = 0.0
    bubble_s: float = 0.0
    phases: dict[str, PhaseTime] = msgspec.field(default_factory=dict)

    @property
    def bubble_share(self) -> float:
        """Share of the device's time that a known request did not get, 0-1."""
        total_s = self.device_busy_s + self.bubble_s
        return self.bubble_s / total_s if total_s else 0.0

    def since(self, earlier: StepStatistics) -> StepStatistics:
        """What came after ``earlier``."""
        before = earlier.phases
        return StepStatistics(
            num_steps=self.num_steps - earlier.num_steps,
            device_busy_s=self.device_busy_s - earlier.device_busy_s,
            bubble_s=self.bubble_s - earlier.bubble_s,
            phases={
                name: PhaseTime(
                    num_timed=time.num_timed - before.get(name, PhaseTime()).num_timed,
                    total_s=time.total_s - before.get(name, PhaseTime()).total_s,
                )
                for name, time in self.phases.items()
            },
        )


class EngineCoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts at one moment, for people and as a test oracle.

    ``num_free_blocks`` counts cached blocks that nobody holds, ``num_cached_blocks`` also those
    that are held. Of the tokens of requests that looked into the prefix cache at their first
    start, ``num_prefix_cache_queries``, so many were there: ``num_prefix_cache_hits``. ``steps``
    is known to an engine, not to a core alone.
    """

    num_running_requests: int
    num_waiting_requests: int
    num_free_blocks: int
    num_cached_blocks: int
    num_blocks: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_plans_in_flight: int
    num_steps: int
    num_preemptions: int
    is_paused: bool
    is_asleep: bool
    is_draining: bool
    steps: StepStatistics | None = None

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the tokens looked for that were cached, 0-1; 0 before the first look."""
        return self.num_prefix_cache_hits / max(1, self.num_prefix_cache_queries)


def count_core(
    scheduler: Scheduler, metrics: RequestMetrics, **others: Any
) -> EngineCoreStatistics:
    """Counts what a scheduler has; ``others`` are the fields that it does not know."""
    pool = scheduler.kv_cache.pool
    return EngineCoreStatistics(
        num_running_requests=len(scheduler.running),
        num_waiting_requests=len(scheduler.waiting),
        num_free_blocks=pool.num_free_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_blocks=pool.num_blocks,
        num_prefix_cache_queries=metrics.prefix_cache.queries,
        num_prefix_cache_hits=metrics.prefix_cache.hits,
        num_preemptions=metrics.num_preemptions,
        **others,
    )
