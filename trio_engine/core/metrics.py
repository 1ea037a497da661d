"""What front ends' metrics need: events and prefill statistics of requests, gauges of all.

Pure. Without events and statistics a vLLM front end's latency and usage figures are nonsense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.outputs import (
    EngineCoreEvent,
    EngineCoreEventType,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.request import Request
    from trio_engine.core.scheduled_step import ScheduledStep
    from trio_engine.core.scheduler import Scheduler


class RequestMetrics:
    """Notes what happens to requests; their next output entries take it along.

    Args:
        clock: of event times: monotonic, in seconds.
        enabled: whether anything is noted but counts.
        caches_prefixes: whether the prefix cache is on.

    Attributes:
        num_preemptions: of all requests so far.
        prefix_cache: how much of the cache's use was a hit, in tokens, since the start.
    """

    def __init__(
        self, clock: Callable[[], float], *, enabled: bool, caches_prefixes: bool = False
    ) -> None:
        self.enabled = enabled
        self.num_preemptions = 0
        self.prefix_cache = PrefixCacheStats()
        self._caches_prefixes = caches_prefixes
        # What front ends have not been told.
        self._untold = PrefixCacheStats()
        self._clock = clock

    def note_queued(self, request: Request) -> None:
        """It was admitted."""
        self._note(request, EngineCoreEventType.QUEUED)

    def note_preempted(self, request: Request) -> None:
        """It lost its slot."""
        self.num_preemptions += 1
        self._note(request, EngineCoreEventType.PREEMPTED)

    def note_moves(self, step: ScheduledStep) -> None:
        """A step preempted and resumed requests, some of them for the first time."""
        for request in step.preempted:
            self.note_preempted(request)
        for request in step.resumed:
            if self.enabled and not request.num_preemptions:
                request.prefill_stats = _prefill_stats(request)
            if self._caches_prefixes and request.may_read_prefix_cache:
                count_query(self.prefix_cache, request)
                count_query(self._untold, request)
            self._note(request, EngineCoreEventType.SCHEDULED)

    def note_cache_reset(self) -> None:
        """The prefix cache was emptied."""
        self._untold.reset = True

    def take_scheduler_stats(self, scheduler: Scheduler) -> SchedulerStats:
        """The gauges as they stand, and what has come since the last call, for the next message."""
        untold, self._untold = self._untold, PrefixCacheStats()
        return SchedulerStats(
            num_running_reqs=len(scheduler.running),
            num_waiting_reqs=scheduler.waiting.num_queued,
            num_skipped_waiting_reqs=scheduler.waiting.num_held_up,
            kv_cache_usage=scheduler.kv_cache.usage,
            prefix_cache_stats=untold,
        )

    def _note(self, request: Request, event: EngineCoreEventType) -> None:
        if self.enabled:
            request.events.append(EngineCoreEvent(event, self._clock()))


def count_query(stats: PrefixCacheStats, request: Request) -> None:
    """A request that just got its blocks had looked for cached ones."""
    queries, hits = len(request.token_ids), request.num_cached_tokens
    if request.num_preemptions:
        stats.preempted_requests += 1
        stats.preempted_queries += queries
        stats.preempted_hits += hits
    else:
        stats.requests += 1
        stats.queries += queries
        stats.hits += hits


def _prefill_stats(request: Request) -> PrefillStats:
    num_cached = request.num_cached_tokens
    return PrefillStats(
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_prompt_tokens - num_cached,
        num_cached_tokens=num_cached,
        num_local_cached_tokens=num_cached,
    )
