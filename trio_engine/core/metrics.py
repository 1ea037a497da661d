"""What front ends' metrics need: events and prefill statistics of requests, gauges of all.

Pure. Without events and statistics a vLLM front end's latency and usage figures are nonsense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.outputs import (
    EngineCoreEvent,
    EngineCoreEventType,
    PrefillStats,
    SchedulerStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.request import Request
    from trio_engine.core.scheduler import ScheduledStep, Scheduler


class RequestMetrics:
    """Notes what happens to requests; their next output entries take it along.

    Args:
        clock: of event times: monotonic, in seconds.
        enabled: whether anything is noted but counts.

    Attributes:
        num_preemptions: of all requests so far.
    """

    def __init__(self, clock: Callable[[], float], *, enabled: bool) -> None:
        self.enabled = enabled
        self.num_preemptions = 0
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
                num_tokens = request.num_prompt_tokens
                request.prefill_stats = PrefillStats(num_tokens, num_tokens)
            self._note(request, EngineCoreEventType.SCHEDULED)

    def _note(self, request: Request, event: EngineCoreEventType) -> None:
        if self.enabled:
            request.events.append(EngineCoreEvent(event, self._clock()))


def scheduler_stats(scheduler: Scheduler) -> SchedulerStats:
    """The gauges as they stand, for the next message."""
    return SchedulerStats(
        num_running_reqs=len(scheduler.running),
        num_waiting_reqs=len(scheduler.waiting),
        kv_cache_usage=scheduler.kv_cache.usage,
    )
