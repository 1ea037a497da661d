"""Counts of the core: for people, for front ends' metrics, and as a test oracle.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from trio_engine.core.metrics import RequestMetrics
    from trio_engine.core.scheduler import Scheduler


class EngineCoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts at one moment, for people and as a test oracle.

    ``num_free_blocks`` counts cached blocks that nobody holds, ``num_cached_blocks`` also those
    that are held. Of the tokens of requests that looked into the prefix cache at their first
    start, ``num_prefix_cache_queries``, so many were there: ``num_prefix_cache_hits``.
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
        num_waiting_requests=scheduler.num_waiting,
        num_free_blocks=pool.num_free_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_blocks=pool.num_blocks,
        num_prefix_cache_queries=metrics.prefix_cache.queries,
        num_prefix_cache_hits=metrics.prefix_cache.hits,
        num_preemptions=metrics.num_preemptions,
        **others,
    )
