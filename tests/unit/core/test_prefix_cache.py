"""The prefix cache in the core: what may be found and when, and that it changes no token.

The executor finds every block that holds something else than it should. Blocks have four tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.core.core_parts import (
    add,
    make_core,
    make_driver,
    make_request,
    make_source,
    plan_step,
    run_step,
    settle,
    take,
    take_messages,
)
from tests.unit.core.scheduler_parts import (
    end,
    ids,
    make_scheduler,
    rows,
    schedule,
    settle as settle_tokens,
)
from trio_engine.errors import RequestStepError
from trio_engine.outputs import PrefillStats, PrefixCacheStats
from trio_engine.requests import PauseMode, SleepTag

if TYPE_CHECKING:
    from trio_engine.testing.core_driver import CoreDriver, RequestLog

pytestmark = pytest.mark.known_fault(kind="wrong-cache-hit")

PROMPT = list(range(100, 120))


def make_cached_driver(num_blocks: int = 16, **config: Any) -> CoreDriver:
    return make_driver(block_size=4, num_blocks=num_blocks, **config)


def serve(driver: CoreDriver, prompt: list[int], request_id: str = "r", **options: Any) -> int:
    """Runs a request to its end; how many of its prompt's tokens were cached."""
    log = add(driver, make_source(request_id, prompt, **{"max_tokens": 5, **options}))
    driver.run_until_idle()
    return num_cached(log)


def num_cached(log: RequestLog) -> int:
    assert log.outputs, "its first output has not come"
    stats = log.outputs[0].prefill_stats
    assert stats is not None
    return stats.num_cached_tokens


def uncached_tokens(prompt: list[int], **options: Any) -> list[int]:
    driver = make_cached_driver(enable_prefix_caching=False)
    log = add(driver, make_source("r", prompt, **{"max_tokens": 5, **options}))
    driver.run_until_idle()
    return log.token_ids


# What is found


@pytest.mark.parametrize("length", [3, 4, 5, 8, 20])
def test_a_prompt_sent_twice_gives_the_same_answer_with_all_but_its_last_block_cached(
    length: int,
) -> None:
    driver, prompt = make_cached_driver(), PROMPT[:length]
    for expected in (0, (length - 1) // 4 * 4):
        log = add(driver, make_source("r", prompt, max_tokens=5))
        driver.run_until_idle()
        assert log.token_ids == uncached_tokens(prompt)
        assert num_cached(log) == expected


def test_a_conversation_goes_on_from_the_answer_s_blocks() -> None:
    driver = make_cached_driver()
    log = add(driver, make_source("r", PROMPT[:6], max_tokens=9))
    driver.run_until_idle()
    # Of 15 tokens the last was drawn and not computed, so 12 are in full blocks.
    turn = [*PROMPT[:6], *log.token_ids, 7, 7]
    again = add(driver, make_source("r", turn, max_tokens=3))
    driver.run_until_idle()
    assert num_cached(again) == 12
    assert again.token_ids == uncached_tokens(turn, max_tokens=3)


@pytest.mark.parametrize("num_tokens", [2, 3, 4])
def test_the_last_block_of_an_answer_is_cached_if_all_of_it_was_computed(num_tokens: int) -> None:
    """Also where the answer ends in the very step that fills the block, or the one before."""
    driver = make_cached_driver()
    log = add(driver, make_source("r", PROMPT[:6], max_tokens=num_tokens))
    driver.run_until_idle()
    num_computed = 6 + num_tokens - 1
    assert serve(driver, [*PROMPT[:6], *log.token_ids, 1, 2, 3]) == num_computed // 4 * 4


def test_a_running_request_shares_what_it_has_computed_so_far() -> None:
    driver = make_cached_driver(max_num_batched_tokens=8)
    first = add(driver, make_source("a", PROMPT, max_tokens=5))
    for _ in range(2):
        driver.schedule()
        driver.launch()
        driver.collect()
    second = add(driver, make_source("b", PROMPT, max_tokens=5))
    driver.run_until_idle()
    assert (num_cached(first), num_cached(second)) == (0, 16)
    assert first.token_ids == second.token_ids == uncached_tokens(PROMPT)


def test_two_that_share_a_prefix_go_on_when_one_is_aborted_in_its_answer() -> None:
    driver = make_cached_driver()
    add(driver, make_source("a", PROMPT[:9], max_tokens=20))
    for _ in range(2):
        driver.schedule()
        driver.launch()
        driver.collect()
    prompt = [*PROMPT[:8], 7, 8]
    log = add(driver, make_source("b", prompt, max_tokens=8))
    driver.schedule()
    driver.core.abort(0, ["a"])
    driver.core.check_integrity()
    driver.run_until_idle()
    assert num_cached(log) == 8
    assert log.token_ids == uncached_tokens(prompt, max_tokens=8)


def test_evicted_blocks_are_not_found() -> None:
    driver = make_cached_driver(num_blocks=8)
    serve(driver, PROMPT)
    for start in (200, 300):
        serve(driver, list(range(start, start + 20)))
    log = add(driver, make_source("r", PROMPT, max_tokens=5))
    driver.run_until_idle()
    assert num_cached(log) == 0
    assert log.token_ids == uncached_tokens(PROMPT)


def test_salts_share_with_their_own_kind_only() -> None:
    driver = make_cached_driver(num_blocks=64)
    found = [
        serve(driver, PROMPT, source_fields={"cache_salt": salt})
        for salt in (None, "a", "b", "a", None, "b", "")
    ]
    assert found == [0, 0, 0, 16, 16, 16, 0]


def test_who_asks_for_prompt_logprobs_or_not_to_read_reads_nothing() -> None:
    driver = make_cached_driver()
    assert serve(driver, PROMPT) == 0
    assert serve(driver, PROMPT, skip_reading_prefix_cache=True) == 0
    assert serve(driver, PROMPT, prompt_logprobs=2) == 0
    assert serve(driver, PROMPT) == 16


def test_without_prefix_caching_nothing_is_found() -> None:
    driver = make_cached_driver(enable_prefix_caching=False)
    assert [serve(driver, PROMPT) for _ in range(2)] == [0, 0]


# When a block may be found (rule 3)


def test_a_block_is_found_once_the_plan_that_computed_it_has_settled_and_not_before() -> None:
    core = make_core(block_size=4, num_blocks=16)
    core.add(make_source("a", PROMPT))
    first = plan_step(core)
    core.add(make_source("b", PROMPT))
    second = plan_step(core)
    assert second.new_rows[0].num_computed_tokens == 0
    settle(core, first, 1)
    core.add(make_source("c", PROMPT))
    (row,) = plan_step(core).new_rows
    assert (row.request_id, row.num_computed_tokens) == ("c", 16)


def test_what_a_failed_plan_computed_is_not_found() -> None:
    core = make_core(block_size=4, num_blocks=16)
    core.add(make_source("a", PROMPT))
    plan = plan_step(core)
    core.fail(plan.plan_id, RequestStepError("planted", slots=[plan.slots[0]]))
    assert core.statistics().num_cached_blocks == 0
    core.add(make_source("b", PROMPT))
    assert plan_step(core).new_rows[0].num_computed_tokens == 0


def test_of_a_failed_request_that_is_found_which_settled_before() -> None:
    core = make_core(block_size=4, num_blocks=16, max_num_batched_tokens=8)
    core.add(make_source("a", PROMPT))
    run_step(core, -1)
    plan = plan_step(core)
    core.fail(plan.plan_id, RequestStepError("planted", slots=[plan.slots[0]]))
    core.add(make_source("b", PROMPT))
    assert plan_step(core).new_rows[0].num_computed_tokens == 8


def test_of_an_aborted_request_only_settled_blocks_are_found() -> None:
    core = make_core(block_size=4, num_blocks=16, max_num_batched_tokens=8)
    core.add(make_source("a", PROMPT))
    run_step(core, -1)
    in_flight = plan_step(core)
    core.abort(0, ["a"])
    settle(core, in_flight, -1)
    assert core.statistics().num_cached_blocks == 2
    core.add(make_source("b", PROMPT))
    assert plan_step(core).new_rows[0].num_computed_tokens == 8


def test_blocks_of_a_row_that_was_preempted_in_flight_are_not_cached_as_what_it_computed() -> None:
    """Made by hand: it has resumed in other blocks when the plan of its first life settles."""
    request = make_request("a", 8)
    scheduler = make_scheduler(request, block_size=4, budget=4)
    in_flight = schedule(scheduler)
    scheduler.preempt_all()
    assert rows(schedule(scheduler, 1)) == [("a", 0, 4, False)]
    scheduler.settle(in_flight)
    scheduler.check_integrity()
    assert scheduler.kv_cache.pool.num_cached_blocks == 0


def test_undoing_a_resumption_does_not_go_back_into_blocks_that_are_shared() -> None:
    """Made by hand, as above: both lives' steps are undone."""
    # It comes to its last token at once, so that its counts are its own.
    first, request = make_request("first", 9), make_request("a", 10, max_tokens=2)
    scheduler = make_scheduler(first, block_size=4)
    step = schedule(scheduler)
    scheduler.settle(step)
    settle_tokens(step)
    end(scheduler, first)
    scheduler.waiting.add(request)
    steps = [schedule(scheduler, 1)]
    assert rows(steps[0]) == [("a", 8, 2, True)]
    scheduler.preempt_all()
    steps[0].starts = [0]  # as if it had found nothing then
    request.num_unsettled_tokens = 0
    steps.append(schedule(scheduler, 2))
    request.num_unsettled_tokens += 1
    scheduler.roll_back(steps)
    assert request.num_planned_tokens == 8
    again = schedule(scheduler, 3)
    assert rows(again) == [("a", 8, 2, True)]
    assert again.plan.new_rows[0].num_computed_tokens == 8


def test_a_prompt_that_may_be_computed_again_in_its_blocks_is_cached_when_that_is_over() -> None:
    """After a failure a request for prompt logprobs starts again from its first token."""
    core = make_core(block_size=4, num_blocks=16, max_num_batched_tokens=8)
    core.add(make_source("a", PROMPT, prompt_logprobs=0))
    run_step(core, -1)
    assert core.statistics().num_cached_blocks == 0
    driver = make_cached_driver(max_num_batched_tokens=8)
    assert serve(driver, PROMPT, prompt_logprobs=0) == 0
    assert serve(driver, PROMPT) == 16


def test_a_preempted_request_resumes_from_its_own_blocks() -> None:
    a, b = make_request("a", 5), make_request("b", [*range(50, 59)])
    scheduler = make_scheduler(a, b, block_size=4)
    step = schedule(scheduler)
    scheduler.settle(step)
    settle_tokens(step)
    assert ids(scheduler.preempt_all()) == ["a", "b"]
    scheduler.check_integrity()
    assert rows(schedule(scheduler, 1)) == [("a", 4, 2, True), ("b", 8, 2, True)]


def test_a_resumed_request_that_finds_some_blocks_is_cut_into_chunks_behind_them() -> None:
    driver = make_cached_driver(num_blocks=9, max_num_batched_tokens=3)
    sources = [make_source(name, PROMPT[:9], max_tokens=14) for name in "ab"]
    logs = [add(driver, source) for source in sources]
    driver.run_until_idle()
    assert driver.core.statistics().num_preemptions >= 1
    for log in logs:
        assert log.token_ids == uncached_tokens(PROMPT[:9], max_tokens=14)


# Reset


def test_a_reset_is_refused_while_blocks_are_held_and_done_when_idle() -> None:
    driver = make_cached_driver()
    add(driver, make_source("a", PROMPT, max_tokens=3))
    driver.schedule()
    driver.launch()
    driver.collect()
    assert driver.core.reset_prefix_cache() is False
    driver.run_until_idle()
    assert serve(driver, PROMPT) == 16
    assert driver.core.reset_prefix_cache() is True
    assert driver.core.statistics().num_cached_blocks == 0
    assert serve(driver, PROMPT) == 0


def test_a_reset_that_preempts_has_running_requests_computed_again_and_right() -> None:
    driver = make_cached_driver()
    log = add(driver, make_source("a", PROMPT, max_tokens=6))
    for _ in range(2):
        driver.schedule()
        driver.launch()
        driver.collect()
    assert driver.core.reset_prefix_cache(reset_running=True) is True
    assert driver.core.statistics().num_cached_blocks == 0
    driver.run_until_idle()
    assert log.token_ids == uncached_tokens(PROMPT, max_tokens=6)
    assert driver.core.statistics().num_preemptions == 1


def test_what_was_cached_does_not_outlast_the_memory_s_sleep() -> None:
    driver = make_cached_driver()
    serve(driver, PROMPT)
    driver.core.pause(PauseMode.KEEP)
    driver.core.fall_asleep([SleepTag.KV_CACHE])
    driver.core.pause_state.wake_up([SleepTag.KV_CACHE])
    driver.core.resume()
    assert serve(driver, PROMPT) == 0


# What is told


def test_prefill_stats_tell_what_was_cached_at_the_first_start() -> None:
    driver = make_cached_driver()
    serve(driver, PROMPT)
    log = add(driver, make_source("b", PROMPT, max_tokens=2))
    driver.run_until_idle()
    assert log.outputs[0].prefill_stats == PrefillStats(
        num_prompt_tokens=20,
        num_computed_tokens=4,
        num_cached_tokens=16,
        num_local_cached_tokens=16,
    )


def test_messages_tell_queries_and_hits_since_the_last_one() -> None:
    core = make_core(block_size=4, num_blocks=16)
    core.add(make_source("a", PROMPT[:9], max_tokens=1))
    run_step(core, 7)
    core.add(make_source("b", PROMPT[:9], max_tokens=3))
    run_step(core, 7)
    run_step(core, 7)
    (message,) = take_messages(core)
    assert message.scheduler_stats is not None
    stats = message.scheduler_stats.prefix_cache_stats
    assert stats == PrefixCacheStats(requests=2, queries=18, hits=8)
    run_step(core, 7)
    (message,) = take_messages(core)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.prefix_cache_stats == PrefixCacheStats()


def test_resumptions_are_told_apart_and_requests_that_do_not_read_not_at_all() -> None:
    core = make_core(block_size=4, num_blocks=16)
    core.add(make_source("a", PROMPT[:9]))
    core.add(make_source("b", PROMPT[:9], skip_reading_prefix_cache=True))
    run_step(core, 7, 7)
    core.preempt_all()
    run_step(core, 7, 7)
    (message,) = take_messages(core)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.prefix_cache_stats == PrefixCacheStats(
        requests=1,
        queries=9,
        preempted_requests=1,
        preempted_queries=10,
        preempted_hits=8,
    )


def test_a_reset_is_told_once_also_without_a_step() -> None:
    core = make_core(block_size=4, num_blocks=16)
    assert core.reset_prefix_cache()
    core.flush_stats()
    (message,) = take_messages(core)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.prefix_cache_stats == PrefixCacheStats(reset=True)
    core.add(make_source("a"))
    run_step(core, 7)
    (message,) = take_messages(core)
    assert message.scheduler_stats is not None
    assert not message.scheduler_stats.prefix_cache_stats.reset


def test_statistics_tell_the_hit_rate_and_what_is_cached() -> None:
    core = make_core(block_size=4, num_blocks=16)
    assert core.statistics().prefix_cache_hit_rate == 0.0
    for name in "ab":
        core.add(make_source(name, PROMPT[:10], max_tokens=1))
        run_step(core, 7)
    take(core)
    statistics = core.statistics()
    assert statistics.prefix_cache_hit_rate == 8 / 20
    assert (statistics.num_prefix_cache_hits, statistics.num_prefix_cache_queries) == (8, 20)
    assert (statistics.num_cached_blocks, statistics.num_free_blocks) == (2, 16)


def test_cached_blocks_that_nobody_holds_are_not_usage() -> None:
    core = make_core(block_size=4, num_blocks=16)
    core.add(make_source("a", PROMPT, max_tokens=1))
    run_step(core, 7)
    (message,) = take_messages(core)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.kv_cache_usage == 0.0
