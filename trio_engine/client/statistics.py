"""What a client counts, for monitoring and as an oracle of tests.

Pure, data only.
"""

from __future__ import annotations

import msgspec

from trio_engine.outputs import PrefixCacheStats, SchedulerStats


class ClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a client holds at this moment.

    Attributes:
        num_requests: sent and not ended.
        num_utility_calls: waiting for an answer.
        num_unsent: messages and aborts not handed to the transport yet.
        is_dead: as ``EngineClient.is_dead``.
        scheduler: of each engine, by its index; empty if they send none. Gauges are the newest,
            prefix cache numbers are summed since the client was opened.
    """

    num_requests: int
    num_utility_calls: int
    num_unsent: int
    is_dead: bool
    scheduler: dict[int, SchedulerStats]


def merge_scheduler_stats(before: SchedulerStats | None, news: SchedulerStats) -> SchedulerStats:
    """The news, with the prefix cache's numbers of both: on the wire these are differences."""
    if before is None:
        return news
    return msgspec.structs.replace(
        news, prefix_cache_stats=_sum(before.prefix_cache_stats, news.prefix_cache_stats)
    )


def _sum(one: PrefixCacheStats, two: PrefixCacheStats) -> PrefixCacheStats:
    sums = {
        name: getattr(one, name) + getattr(two, name)
        for name in PrefixCacheStats.__struct_fields__
        if name != "reset"
    }
    return PrefixCacheStats(reset=one.reset or two.reset, **sums)
