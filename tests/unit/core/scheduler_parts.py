"""A scheduler driven by hand, in place of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.core.kv_cache import KVCacheManager
from trio_engine.core.lifecycle import RequestEvent
from trio_engine.core.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_engine.config import SchedulingPolicy
    from trio_engine.core.request import Request
    from trio_engine.core.scheduled_step import ScheduledStep


def make_scheduler(
    *requests: Request,
    num_blocks: int = 64,
    block_size: int = 1,
    max_num_seqs: int = 8,
    budget: int = 64,
    long_prefill: int = 0,
    policy: SchedulingPolicy = "fcfs",
    max_loras: int = 0,
) -> Scheduler:
    """Where a block is one token, a request holds as many as it has planned or was granted."""
    scheduler = Scheduler(
        KVCacheManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=long_prefill,
        policy=policy,
        max_loras=max_loras,
    )
    for request in requests:
        scheduler.waiting.add(request)
    return scheduler


def schedule(scheduler: Scheduler, plan_id: int = 0, *, admit: bool = True) -> ScheduledStep:
    step = scheduler.schedule(plan_id, admit=admit)
    scheduler.check_integrity()
    return step


def settle(step: ScheduledStep, token_id: int = 100) -> None:
    """Gives every live sampling row its token, as the core does."""
    for request, samples in zip(step.requests, step.samples, strict=True):
        if samples and not request.is_finished:
            if request.decode_offset is None:
                request.num_unsettled_tokens -= 1
            request.token_ids.append(token_id)


def end(scheduler: Scheduler, request: Request) -> None:
    """Ends a request, as the core does for an abort."""
    scheduler.remove(request)
    request.advance(RequestEvent.ABORT)
    scheduler.check_integrity()


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def rows(step: ScheduledStep) -> list[tuple[str, int | None, int, bool]]:
    """(id, start, number of tokens, whether it samples) of each row; no start if it decodes."""
    starts = [*[None] * len(step.decodes.requests), *step.starts]
    return [
        (request.request_id, start, num_tokens, samples)
        for request, start, num_tokens, samples in zip(
            step.requests, starts, step.plan.num_scheduled_tokens, step.samples, strict=True
        )
    ]
