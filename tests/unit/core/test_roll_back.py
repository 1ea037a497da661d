"""Undoing steps that failed or do not count: what is left of rows, blocks and plans (rule 6)."""

from __future__ import annotations

from tests.unit.core.core_parts import make_request
from tests.unit.core.scheduler_parts import end, ids, make_scheduler, rows, schedule, settle
from trio_engine.core.lifecycle import RequestStatus


def test_roll_back_goes_to_the_last_settled_token_and_sends_the_row_anew() -> None:
    request = make_request("a", [7, 8])
    scheduler = make_scheduler(request)
    settle(schedule(scheduler), 50)
    steps = [schedule(scheduler, 1), schedule(scheduler, 2)]
    blocks = list(request.block_ids)
    scheduler.roll_back(steps)
    scheduler.check_integrity()
    assert (request.num_planned_tokens, request.num_unsettled_tokens) == (2, 0)
    again = schedule(scheduler, 3)
    assert again.plan.reset
    assert rows(again) == [("a", 2, 1, True)]
    (row,) = again.plan.new_rows
    assert (row.token_ids, row.num_computed_tokens) == ([7, 8, 50], 2)
    assert row.block_ids == blocks
    assert again.plan.new_block_ids == []


def test_only_the_first_plan_after_a_roll_back_is_a_reset() -> None:
    scheduler = make_scheduler(make_request("a", 2))
    step = schedule(scheduler)
    assert not step.plan.reset
    scheduler.roll_back([step])
    assert [schedule(scheduler, plan_id).plan.reset for plan_id in (1, 2)] == [True, False]


def test_a_reset_is_kept_for_a_plan_that_has_rows() -> None:
    request = make_request("a", 2)
    scheduler = make_scheduler(request)
    scheduler.roll_back([schedule(scheduler)])
    end(scheduler, request)
    assert not schedule(scheduler, 1).plan.reset
    scheduler.waiting.add(make_request("b", 1))
    assert schedule(scheduler, 1).plan.reset


def test_roll_back_of_a_chunk_takes_back_no_sample() -> None:
    request = make_request("a", 10)
    scheduler = make_scheduler(request, budget=4)
    settle(schedule(scheduler))
    steps = [schedule(scheduler, 1), schedule(scheduler, 2)]
    assert request.num_unsettled_tokens == 1
    scheduler.roll_back(steps)
    assert (request.num_planned_tokens, request.num_unsettled_tokens) == (4, 0)


def test_roll_back_forgets_freed_slots_as_the_reset_drops_all_rows() -> None:
    gone, other = make_request("gone", 2), make_request("other", 2)
    scheduler = make_scheduler(gone, other)
    step = schedule(scheduler)
    end(scheduler, gone)
    scheduler.roll_back([step])
    again = schedule(scheduler, 1)
    assert again.plan.finished_slots == []
    assert [row.request_id for row in again.plan.new_rows] == ["other"]


def test_a_row_that_ends_between_roll_back_and_reset_is_not_told() -> None:
    gone, other = make_request("gone", 2), make_request("other", 2)
    scheduler = make_scheduler(gone, other)
    scheduler.roll_back([schedule(scheduler)])
    end(scheduler, gone)
    assert schedule(scheduler, 1).plan.finished_slots == []


def test_roll_back_leaves_a_finished_request_as_it_is() -> None:
    request = make_request("a", 2)
    scheduler = make_scheduler(request)
    step = schedule(scheduler)
    end(scheduler, request)
    scheduler.roll_back([step])
    assert (request.num_planned_tokens, request.num_unsettled_tokens) == (2, 1)


def test_rows_outside_the_undone_steps_are_sent_anew_when_they_next_run() -> None:
    a, b = make_request("a", 1), make_request("b", 1)
    scheduler = make_scheduler(a, b, budget=2)
    settle(schedule(scheduler))
    scheduler.max_num_batched_tokens = 1
    only_a = schedule(scheduler, 1)
    assert ids(only_a.requests) == ["a"]
    scheduler.roll_back([only_a])
    end(scheduler, a)
    step = schedule(scheduler, 2)
    assert [row.request_id for row in step.plan.new_rows] == ["b"]
    assert step.plan.new_rows[0].num_computed_tokens == 1


def test_roll_back_of_a_row_preempted_meanwhile_leaves_nothing_computed() -> None:
    """Its blocks are others' now: back at the step's start it would read what is not there."""
    a, b = make_request("a", 3), make_request("b", 2)
    scheduler = make_scheduler(a, b, num_blocks=7)
    settle(schedule(scheduler))
    first = schedule(scheduler, 1)
    second = schedule(scheduler, 2)
    assert ids(second.preempted) == ["b"]
    assert (b.num_unsettled_tokens, ids(first.decodes.requests)) == (1, ["a", "b"])
    scheduler.roll_back([first, second])
    scheduler.check_integrity()
    assert (b.num_planned_tokens, b.num_unsettled_tokens) == (0, 0)
    assert (a.num_planned_tokens, a.num_unsettled_tokens) == (3, 0)
    end(scheduler, a)
    (row,) = schedule(scheduler, 3).plan.new_rows
    assert (row.num_computed_tokens, row.token_ids) == (0, [0, 1, 100])


def test_roll_back_of_a_row_preempted_and_resumed_goes_to_the_resumption_s_start() -> None:
    """Made by hand: the first of the two steps knew the request with other blocks."""
    request = make_request("a", 10)
    scheduler = make_scheduler(request, budget=4)
    settle(schedule(scheduler))
    first = schedule(scheduler, 1)
    assert rows(first) == [("a", 4, 4, False)]
    scheduler.preempt_all()
    second = schedule(scheduler, 2)
    assert rows(second) == [("a", 0, 4, False)]
    scheduler.roll_back([first, second])
    scheduler.check_integrity()
    assert (request.num_planned_tokens, request.num_unsettled_tokens) == (0, 0)
    assert request.status is RequestStatus.RUNNING


def test_a_victim_with_blocks_to_spare_is_not_resumed_by_the_step_that_preempted_it() -> None:
    """Undone steps may leave a row with more blocks than its known tokens need."""
    a, b = make_request("a", 2), make_request("b", 7)
    scheduler = make_scheduler(a, b, num_blocks=4, block_size=4)
    settle(schedule(scheduler))
    scheduler.roll_back([schedule(scheduler, 1), schedule(scheduler, 2)])
    assert (len(b.token_ids), len(b.block_ids)) == (8, 3)
    scheduler.max_num_batched_tokens = 1
    settle(schedule(scheduler, 3))
    settle(schedule(scheduler, 4))
    scheduler.max_num_batched_tokens = 64
    step = schedule(scheduler, 5)
    assert (ids(step.requests), ids(step.preempted)) == (["a"], ["b"])
    assert scheduler.kv_cache.pool.num_free_blocks == 2
    settle(step)
    assert ids(schedule(scheduler, 6).resumed) == ["b"]
