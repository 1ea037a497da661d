"""Sleep as the core sees it: no blocks, no plans, no resume; and what a drain does to it."""

from __future__ import annotations

import pytest

from tests.unit.core.core_parts import (
    add,
    make_core,
    make_driver,
    make_source,
    plan_step,
    run_step,
    solo_tokens,
    take,
    take_messages,
)
from trio_engine.core.pause import MEMORY_TAGS, RELEASED_AT, PauseState
from trio_engine.errors import RequestError, UtilityError
from trio_engine.outputs import FinishReason
from trio_engine.requests import PauseMode, SleepTag

pytestmark = pytest.mark.known_fault(kind="lost-in-sleep")

KV_CACHE = frozenset({SleepTag.KV_CACHE})


# Pauses by number


def test_a_resume_ends_every_pause_and_a_newer_pause_none() -> None:
    state = PauseState()
    first, second = state.begin(PauseMode.KEEP), state.begin(PauseMode.WAIT)
    assert (state.mode, state.num_pauses) == (PauseMode.WAIT, second)
    state.check_on(first)
    state.check_on(second)
    state.resume()
    assert not state.is_on
    third = state.begin(PauseMode.ABORT)
    state.check_on(third)
    for number in (first, second):
        with pytest.raises(UtilityError, match="resumed before it had come to rest"):
            state.check_on(number)


def test_a_resume_without_a_pause_changes_nothing() -> None:
    state = PauseState()
    state.resume()
    state.check_on(state.begin(PauseMode.KEEP))


def test_the_levels_give_back_nothing_the_kv_cache_and_everything() -> None:
    assert RELEASED_AT[0] == frozenset()
    assert RELEASED_AT[1] == KV_CACHE
    assert RELEASED_AT[2] == MEMORY_TAGS == {SleepTag.KV_CACHE, SleepTag.WEIGHTS}


# Asleep


def test_nothing_runs_and_nothing_resumes_before_all_memory_is_back() -> None:
    core = make_core()
    core.pause(PauseMode.ABORT)
    core.fall_asleep(MEMORY_TAGS)
    assert core.statistics().is_asleep
    core.add(make_source("a", max_tokens=1))
    assert core.schedule() is None
    for tag, left in ((SleepTag.WEIGHTS, "kv_cache, weights"), (SleepTag.KV_CACHE, "kv_cache")):
        with pytest.raises(RequestError, match=f"cannot resume while memory sleeps: {left}$"):
            core.resume()
        core.pause_state.wake_up({tag})
    assert core.pause_state.is_on
    assert core.schedule() is None
    core.resume()
    run_step(core, 7)
    assert not core.statistics().is_asleep


def test_sleep_takes_the_blocks_of_kept_requests_and_their_tokens_stay_the_same() -> None:
    driver = make_driver(max_num_seqs=2)
    sources = [make_source(name, 3, max_tokens=9) for name in "abc"]
    logs = [add(driver, source) for source in sources]
    for _ in range(3):
        driver.schedule()
        driver.launch()
        driver.collect()
    driver.core.pause(PauseMode.KEEP)
    driver.core.fall_asleep(KV_CACHE)
    driver.core.check_integrity()
    statistics = driver.core.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks
    assert statistics.num_preemptions == 2
    driver.core.pause_state.wake_up(KV_CACHE)
    driver.core.resume()
    driver.run_until_idle()
    assert [log.token_ids for log in logs] == [solo_tokens(source) for source in sources]


def test_a_pause_that_waits_has_nothing_to_wait_for_in_sleep() -> None:
    """Kept requests could never finish while memory sleeps; they do once it is back."""
    core = make_core()
    core.add(make_source("a", max_tokens=2))
    run_step(core, 7)
    core.pause(PauseMode.KEEP)
    core.fall_asleep(KV_CACHE)
    core.pause(PauseMode.WAIT)
    assert core.is_quiescent
    assert core.schedule() is None
    core.pause_state.wake_up(KV_CACHE)
    assert not core.is_quiescent
    run_step(core, 8)
    assert core.is_quiescent
    assert core.pause_state.is_on


def test_blocks_are_not_given_back_under_a_plan_in_flight() -> None:
    core = make_core()
    core.add(make_source("a"))
    plan_step(core)
    core.pause(PauseMode.KEEP)
    with pytest.raises(AssertionError, match="plans are in flight"):
        core.fall_asleep(KV_CACHE)


def test_an_abort_works_in_sleep() -> None:
    core = make_core()
    core.add(make_source("old"))
    run_step(core, 7)
    take(core)
    core.pause(PauseMode.KEEP)
    core.fall_asleep(KV_CACHE)
    core.add(make_source("new"))
    core.abort(0, ["old", "new"])
    core.check_integrity()
    (message,) = take_messages(core)
    assert (message.outputs, message.finished_requests) == ([], {"old", "new"})


# Drains


def test_a_drain_in_sleep_aborts_all_instead_of_waking_up() -> None:
    core = make_core()
    core.add(make_source("kept"))
    run_step(core, 7)
    take(core)
    number = core.pause(PauseMode.KEEP)
    core.fall_asleep(KV_CACHE)
    core.add(make_source("queued"))
    core.start_draining()
    core.add(make_source("late"))
    assert {o.request_id: o.finish_reason for o in take(core)} == dict.fromkeys(
        ("kept", "queued", "late"), FinishReason.ABORT
    )
    assert not core.has_requests
    assert not core.pause_state.is_on
    assert core.schedule() is None
    with pytest.raises(UtilityError, match="shutting down"):
        core.pause_state.check_on(number)


# Gauges


def test_what_comes_during_a_pause_is_told_as_waiting() -> None:
    core = make_core()
    core.pause(PauseMode.KEEP)
    core.add(make_source("a"))
    core.flush_stats()
    (message,) = take_messages(core)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.num_waiting_reqs == 1
    core.flush_stats()
    assert core.outboxes[0].is_empty


def test_blocks_that_a_pause_takes_are_told_as_free() -> None:
    core = make_core()
    core.add(make_source("a"))
    run_step(core, 7)
    core.pause(PauseMode.KEEP)
    (message,) = take_messages(core)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.kv_cache_usage > 0
    core.preempt_all()
    core.flush_stats()
    (message,) = take_messages(core)
    stats = message.scheduler_stats
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (0, 1, 0.0)
    core.preempt_all()
    core.flush_stats()
    assert core.outboxes[0].is_empty  # nobody was left to lose anything
