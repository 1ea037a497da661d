"""Pauses and drains: which requests run, which wait, and that each gets its end."""

from __future__ import annotations

import pytest

from tests.unit.core.core_parts import (
    add,
    event_types,
    make_core,
    make_driver,
    make_source,
    plan_step,
    run_step,
    settle,
    solo_tokens,
    take,
    take_messages,
)
from trio_engine.outputs import (
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from trio_engine.requests import PauseMode

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def ends(outputs: list[EngineCoreOutput]) -> dict[str, FinishReason | None]:
    return {output.request_id: output.finish_reason for output in outputs}


# Draining


def test_a_drain_refuses_new_requests_by_abort_and_lets_all_others_finish() -> None:
    core = make_core(max_num_seqs=1)
    core.add(make_source("runs", max_tokens=2))
    core.add(make_source("waits", max_tokens=1))
    run_step(core, 7)
    core.start_draining()
    core.add(make_source("late"))
    core.add(make_source("bad", []))
    assert core.statistics().is_draining
    run_step(core, 8)
    run_step(core, 9)
    (message,) = take_messages(core)
    assert ends(message.outputs) == {
        "runs": FinishReason.LENGTH,
        "waits": FinishReason.LENGTH,
        "late": FinishReason.ABORT,
        "bad": FinishReason.ABORT,
    }
    assert message.finished_requests == {"runs", "waits", "late", "bad"}
    assert not core.has_requests


def test_a_drain_ends_a_pause_so_that_paused_requests_get_their_end() -> None:
    core = make_core()
    core.add(make_source("a", max_tokens=1))
    core.pause(PauseMode.KEEP)
    core.start_draining()
    assert not core.pause_state.is_on
    run_step(core, 7)
    assert ends(take(core)) == {"a": FinishReason.LENGTH}


# Pauses


@pytest.mark.parametrize("mode", PauseMode)
def test_whatever_the_pause_new_requests_queue_until_resume(mode: PauseMode) -> None:
    core = make_core()
    core.pause(mode)
    core.pause(mode)
    assert core.pause_state.is_on
    assert core.is_quiescent
    core.add(make_source("new", max_tokens=1))
    assert core.schedule() is None
    assert core.is_quiescent
    assert core.outboxes[0].is_empty
    core.resume()
    core.resume()
    assert not core.pause_state.is_on
    run_step(core, 7)
    assert ends(take(core)) == {"new": FinishReason.LENGTH}


@pytest.mark.parametrize("mode", PauseMode)
def test_an_abort_works_during_a_pause(mode: PauseMode) -> None:
    core = make_core()
    core.add(make_source("old"))
    run_step(core, 7)
    core.pause(mode)
    core.add(make_source("new"))
    core.abort(0, ["old", "new"])
    core.check_integrity()
    assert not core.has_requests
    assert core.is_quiescent


def test_pause_abort_ends_what_runs_and_what_waits() -> None:
    core = make_core(max_num_seqs=1)
    core.add(make_source("runs"))
    core.add(make_source("waits"))
    plan = plan_step(core)
    core.pause(PauseMode.ABORT)
    assert ends(take(core)) == {"runs": FinishReason.ABORT, "waits": FinishReason.ABORT}
    assert not core.is_quiescent
    settle(core, plan, 7)
    assert core.is_quiescent
    assert take(core) == []


def test_pause_wait_lets_running_requests_finish_and_starts_none() -> None:
    core = make_core(max_num_seqs=1)
    core.add(make_source("runs", max_tokens=2))
    core.add(make_source("waits", max_tokens=1))
    run_step(core, 7)
    core.pause(PauseMode.WAIT)
    assert not core.is_quiescent
    plan = plan_step(core)
    assert not core.is_quiescent
    settle(core, plan, 8)
    assert core.is_quiescent
    assert core.schedule() is None
    assert ends(take(core)) == {"runs": FinishReason.LENGTH}
    core.resume()
    run_step(core, 9)
    assert ends(take(core)) == {"waits": FinishReason.LENGTH}


def test_pause_wait_counts_a_preempted_request_as_running() -> None:
    core = make_core(num_blocks=6)
    core.add(make_source("a", 3, max_tokens=2))
    core.add(make_source("b", 2, max_tokens=3))
    run_step(core, 7, 8)
    core.pause(PauseMode.WAIT)
    core.add(make_source("new", max_tokens=1))
    run_step(core, 7)
    assert core.statistics().num_running_requests == 0
    assert core.has_running_requests
    assert not core.is_quiescent
    run_step(core, 9)
    run_step(core, 10)
    assert core.is_quiescent
    outputs = {output.request_id: output.new_token_ids for output in take(core)}
    assert outputs == {"a": [7, 7], "b": [8, 9, 10]}


def test_pause_keep_freezes_everything_and_no_token_is_lost() -> None:
    driver = make_driver(max_num_seqs=1)
    running, waiting = make_source("runs", 3, max_tokens=9), make_source("waits", 2, max_tokens=4)
    logs = [add(driver, running), add(driver, waiting)]
    driver.schedule()
    driver.launch()
    driver.schedule()
    driver.core.pause(PauseMode.KEEP)
    assert not driver.core.is_quiescent
    driver.run_until_idle()
    assert driver.core.is_quiescent
    assert len(logs[0].token_ids) == 2
    assert driver.core.statistics().num_running_requests == 1
    driver.core.resume()
    driver.run_until_idle()
    assert [log.token_ids for log in logs] == [solo_tokens(running), solo_tokens(waiting)]


def test_kept_requests_whose_blocks_are_taken_are_computed_again() -> None:
    driver = make_driver()
    sources = [make_source("a", 3, max_tokens=9), make_source("b", 4, max_tokens=8)]
    logs = [add(driver, source) for source in sources]
    for _ in range(3):
        driver.schedule()
        driver.launch()
        driver.collect()
    driver.core.pause(PauseMode.KEEP)
    assert driver.core.statistics().num_running_requests
    driver.core.preempt_all()
    driver.core.check_integrity()
    assert not driver.core.statistics().num_running_requests
    statistics = driver.core.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks
    assert statistics.num_preemptions == 2
    driver.core.resume()
    driver.run_until_idle()
    assert [log.token_ids for log in logs] == [solo_tokens(source) for source in sources]
    last = [output for output in logs[0].outputs if output.events][-1]
    assert event_types(last)[-2:] == [PREEMPTED, SCHEDULED]


def test_blocks_are_not_taken_under_a_plan_in_flight() -> None:
    core = make_core()
    core.add(make_source("a"))
    plan_step(core)
    with pytest.raises(AssertionError, match="plans are in flight"):
        core.preempt_all()
