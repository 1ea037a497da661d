"""Which rows a step has, in what order, and what its plan says of them."""

from __future__ import annotations

import pytest

from tests.unit.core.core_parts import make_request
from tests.unit.core.scheduler_parts import end, ids, make_scheduler, rows, schedule, settle
from trio_engine.core.lifecycle import RequestStatus
from trio_engine.core.plan import StepPlan
from trio_engine.core.request import NO_SLOT

# A first step


def test_an_idle_scheduler_plans_nothing() -> None:
    step = schedule(make_scheduler())
    assert not step.requests
    assert not step.plan.slots


def test_new_requests_start_in_the_order_of_their_coming() -> None:
    scheduler = make_scheduler(make_request("a", 3), make_request("b", 2))
    step = schedule(scheduler)
    assert rows(step) == [("a", 0, 3, True), ("b", 0, 2, True)]
    assert ids(step.resumed) == ["a", "b"]
    assert ids(scheduler.running) == ["a", "b"]
    assert not scheduler.waiting


def test_a_new_row_carries_all_that_the_executor_needs() -> None:
    request = make_request("a", [7, 8, 9])
    step = schedule(make_scheduler(request))
    (row,) = step.plan.new_rows
    assert (row.slot, row.request_id) == (request.slot, "a")
    assert (row.token_ids, row.num_prompt_tokens, row.num_computed_tokens) == ([7, 8, 9], 3, 0)
    assert row.block_ids == request.block_ids
    assert len(row.block_ids) == 3
    assert row.sampling_params is request.sampling_params
    assert list(step.plan.slots) == [request.slot]
    assert step.plan.new_block_ids == []


def test_a_row_s_lists_are_copies_as_another_thread_reads_them() -> None:
    request = make_request("a", 2)
    step = schedule(make_scheduler(request))
    (row,) = step.plan.new_rows
    request.token_ids.append(5)
    request.block_ids.append(60)
    assert len(row.token_ids) == len(row.block_ids) == 2
    request.block_ids.pop()


def test_slots_limit_how_many_run() -> None:
    scheduler = make_scheduler(*(make_request(name, 1) for name in "abc"), max_num_seqs=2)
    assert ids(schedule(scheduler).requests) == ["a", "b"]
    assert ids(scheduler.waiting) == ["c"]
    end(scheduler, scheduler.running[0])
    assert ids(schedule(scheduler).requests) == ["b", "c"]


def test_a_prompt_is_granted_all_its_blocks_even_where_it_starts_with_a_chunk() -> None:
    request = make_request("a", 10)
    schedule(make_scheduler(request, budget=4))
    assert len(request.block_ids) == 10
    assert request.num_planned_tokens == 4


def test_a_prompt_that_finds_no_room_waits_and_nobody_overtakes_it() -> None:
    scheduler = make_scheduler(
        make_request("a", 5), make_request("big", 6), make_request("c", 1), num_blocks=10
    )
    step = schedule(scheduler)
    assert ids(step.requests) == ["a"]
    assert not step.preempted
    assert ids(scheduler.waiting) == ["big", "c"]


def test_without_admission_new_requests_wait_and_running_ones_go_on() -> None:
    scheduler = make_scheduler(make_request("a", 2))
    settle(schedule(scheduler))
    scheduler.waiting.add(make_request("b", 2))
    assert rows(schedule(scheduler, 1, admit=False)) == [("a", None, 1, True)]
    assert ids(scheduler.waiting) == ["b"]
    assert ids(schedule(scheduler, 2).resumed) == ["b"]


# Chunks and the token budget


def test_a_long_prompt_is_computed_in_chunks_and_samples_with_its_last_token_only() -> None:
    scheduler = make_scheduler(make_request("a", 10), budget=4)
    steps = [schedule(scheduler, plan_id) for plan_id in range(3)]
    assert [rows(step) for step in steps] == [
        [("a", 0, 4, False)],
        [("a", 4, 4, False)],
        [("a", 8, 2, True)],
    ]
    assert [len(step.plan.new_rows) for step in steps] == [1, 0, 0]
    assert [step.plan.new_block_ids for step in steps] == [[], [], []]


def test_running_requests_come_before_waiting_ones_in_the_budget() -> None:
    scheduler = make_scheduler(make_request("a", 2), budget=4)
    settle(schedule(scheduler))
    scheduler.waiting.add(make_request("b", 10))
    scheduler.waiting.add(make_request("c", 1))
    step = schedule(scheduler, 1)
    assert rows(step) == [("a", None, 1, True), ("b", 0, 3, False)]
    assert step.plan.num_tokens == 4


def test_a_spent_budget_leaves_later_running_requests_for_the_next_step() -> None:
    scheduler = make_scheduler(*(make_request(name, 1) for name in "abc"), budget=3)
    settle(schedule(scheduler))
    scheduler.max_num_batched_tokens = 2
    assert ids(schedule(scheduler, 1).requests) == ["a", "b"]


# Decoding


def test_the_next_step_runs_on_the_token_that_nobody_knows_yet() -> None:
    request = make_request("a", 2)
    scheduler = make_scheduler(request)
    schedule(scheduler)
    assert request.num_unsettled_tokens == 1
    step = schedule(scheduler, 1)
    assert rows(step) == [("a", None, 1, True)]
    assert not step.plan.new_rows
    assert step.plan.new_block_ids == [(request.slot, [request.block_ids[2]])]
    scheduler.preempt_all()  # counts again what the decode batch does not count for each
    assert request.num_unsettled_tokens == 2


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len"), [(2, 64), (50, 4)], ids=["max_tokens", "max_model_len"]
)
def test_no_row_is_wasted_beyond_a_limit_with_a_token_unsettled(
    max_tokens: int, max_model_len: int
) -> None:
    """Rule 4: prompt of 2, total of 4; two samples are planned and never a third."""
    request = make_request("a", 2, max_tokens=max_tokens, max_model_len=max_model_len)
    scheduler = make_scheduler(request)
    first, second = schedule(scheduler), schedule(scheduler, 1)
    assert [step.samples for step in (first, second)] == [[True], [True]]
    assert not schedule(scheduler, 2).requests
    settle(first)
    assert not schedule(scheduler, 2).requests


def test_a_request_at_its_limit_holds_up_nobody_behind_it() -> None:
    scheduler = make_scheduler(make_request("a", 2, max_tokens=1), make_request("b", 2))
    schedule(scheduler)
    assert rows(schedule(scheduler, 1)) == [("b", None, 1, True)]


# The end of a row


def test_a_freed_slot_is_told_by_the_next_plan_and_may_be_set_up_in_it() -> None:
    gone, other = make_request("gone", 2), make_request("other", 2)
    scheduler = make_scheduler(gone, other, max_num_seqs=2)
    settle(schedule(scheduler))
    slot = gone.slot
    end(scheduler, gone)
    assert gone.slot == NO_SLOT
    newcomer = make_request("new", 1)
    scheduler.waiting.add(newcomer)
    step = schedule(scheduler, 1)
    assert step.plan.finished_slots == [slot]
    assert [row.slot for row in step.plan.new_rows] == [slot] == [newcomer.slot]
    assert schedule(scheduler, 2).plan.finished_slots == []


def test_a_freed_slot_waits_for_a_plan_that_has_rows() -> None:
    request = make_request("a", 2)
    scheduler = make_scheduler(request)
    settle(schedule(scheduler))
    slot = request.slot
    end(scheduler, request)
    assert schedule(scheduler, 1).plan.finished_slots == []
    scheduler.waiting.add(make_request("b", 1))
    assert schedule(scheduler, 1).plan.finished_slots == [slot]


def test_a_waiting_request_leaves_without_a_trace() -> None:
    scheduler = make_scheduler(*(make_request(name, 1) for name in "abc"))
    end(scheduler, list(scheduler.waiting)[1])
    assert ids(schedule(scheduler).requests) == ["a", "c"]


# Preemption


def test_the_youngest_running_request_is_preempted_and_stands_first_in_the_queue() -> None:
    a, b, c = (make_request(name, 2) for name in "abc")
    scheduler = make_scheduler(a, b, c, num_blocks=6)
    settle(schedule(scheduler))
    scheduler.waiting.add(make_request("d", 1))
    slot = c.slot
    step = schedule(scheduler, 1)
    assert ids(step.requests) == ["a", "b"]
    assert ids(step.preempted) == ["c"]
    assert ids(scheduler.waiting) == ["c", "d"]
    assert step.plan.finished_slots == [slot]
    assert c.status is RequestStatus.PREEMPTED
    assert (c.block_ids, c.slot, c.num_planned_tokens, c.num_preemptions) == ([], NO_SLOT, 0, 1)


def test_several_victims_keep_their_order_in_the_queue() -> None:
    a, b, c = make_request("a", 4), make_request("b", 1), make_request("c", 1)
    scheduler = make_scheduler(a, b, c, num_blocks=6)
    settle(schedule(scheduler))
    a.token_ids.append(100)  # as if it had decoded twice: it needs two blocks now
    step = schedule(scheduler, 1)
    assert ids(step.requests) == ["a"]
    assert ids(step.preempted) == ["c", "b"]
    assert ids(scheduler.waiting) == ["b", "c"]


def test_a_request_without_a_younger_one_preempts_itself() -> None:
    a, b = make_request("a", 3), make_request("b", 2)
    scheduler = make_scheduler(a, b, num_blocks=6)
    settle(schedule(scheduler))
    step = schedule(scheduler, 1)
    assert ids(step.requests) == ["a"]
    assert ids(step.preempted) == ["b"]
    assert b.status is RequestStatus.PREEMPTED


def test_a_step_that_preempts_admits_nobody() -> None:
    """Or the victim's own blocks would bring it back, to be preempted again by the next step."""
    a, b = make_request("a", 3), make_request("b", 3)
    scheduler = make_scheduler(a, b, num_blocks=6)
    settle(schedule(scheduler))
    scheduler.waiting.add(make_request("tiny", 1))
    step = schedule(scheduler, 1)
    assert ids(step.requests) == ["a"]
    assert not step.resumed
    settle(step)
    end(scheduler, a)
    assert ids(schedule(scheduler, 2).resumed) == ["b", "tiny"]


def test_a_resumed_request_replays_its_prompt_and_output_in_a_new_row() -> None:
    a, b = make_request("a", 3), make_request("b", [7, 8])
    scheduler = make_scheduler(a, b, num_blocks=6)
    settle(schedule(scheduler), 50)
    settle(schedule(scheduler, 1), 51)
    end(scheduler, a)
    step = schedule(scheduler, 2)
    assert rows(step) == [("b", 0, 3, True)]
    (row,) = step.plan.new_rows
    assert (row.token_ids, row.num_prompt_tokens, row.num_computed_tokens) == ([7, 8, 50], 2, 0)
    assert ids(step.resumed) == ["b"]


def test_a_resumed_request_samples_only_at_the_end_of_its_output_and_not_of_its_prompt() -> None:
    a, b = make_request("a", 3), make_request("b", 2)
    scheduler = make_scheduler(a, b, num_blocks=8)
    for plan_id in range(3):
        settle(schedule(scheduler, plan_id))
    end(scheduler, a)
    assert b.status is RequestStatus.PREEMPTED
    scheduler.max_num_batched_tokens = 2
    assert rows(schedule(scheduler, 3)) == [("b", 0, 2, False)]
    assert rows(schedule(scheduler, 4)) == [("b", 2, 2, True)]


def test_a_preempted_request_resumes_though_new_ones_may_not_start() -> None:
    a, b = make_request("a", 3), make_request("b", 2)
    scheduler = make_scheduler(a, b, num_blocks=6)
    settle(schedule(scheduler))
    settle(schedule(scheduler, 1))
    scheduler.waiting.add(make_request("new", 1))
    end(scheduler, a)
    step = schedule(scheduler, 2, admit=False)
    assert ids(step.resumed) == ["b"]
    assert ids(scheduler.waiting) == ["new"]


def test_a_preempted_request_is_not_resumed_before_its_token_has_settled() -> None:
    """Rule 5, in the one case where a step can be planned while the token is in flight.

    ``z`` is at its planned limit, so the step in which ``r`` preempts itself is empty; ``r``'s
    freed blocks would do for what is known of it.
    """
    z, r = make_request("z", 3, max_tokens=2), make_request("r", 2)
    scheduler = make_scheduler(z, r, num_blocks=7)
    settle(schedule(scheduler))
    in_flight = schedule(scheduler, 1)
    assert ids(in_flight.requests) == ["r", "z"]  # "r" decodes on, "z" is at its last token
    empty = schedule(scheduler, 2)
    assert (empty.requests, ids(empty.preempted)) == ([], ["r"])
    scheduler.waiting.add(make_request("behind", 1))
    assert not schedule(scheduler, 2).requests
    settle(in_flight, 77)
    end(scheduler, z)
    step = schedule(scheduler, 2)
    assert ids(step.resumed) == ["r", "behind"]
    assert step.plan.new_rows[0].token_ids == [0, 1, 100, 77]


def test_the_rows_of_an_empty_step_are_told_by_the_next_one() -> None:
    z, r = make_request("z", 3, max_tokens=2), make_request("r", 2)
    scheduler = make_scheduler(z, r, num_blocks=7)
    settle(schedule(scheduler))
    in_flight = schedule(scheduler, 1)
    slot = r.slot
    schedule(scheduler, 2)
    settle(in_flight)
    assert schedule(scheduler, 2).plan.finished_slots == []
    end(scheduler, z)
    assert slot in schedule(scheduler, 2).plan.finished_slots


def test_preempt_all_keeps_tokens_and_order_and_frees_everything() -> None:
    a, b = make_request("a", 2), make_request("b", 2)
    scheduler = make_scheduler(a, b)
    settle(schedule(scheduler))
    scheduler.waiting.add(make_request("c", 1))
    assert ids(scheduler.preempt_all()) == ["a", "b"]
    scheduler.check_integrity()
    assert ids(scheduler.waiting) == ["a", "b", "c"]
    assert scheduler.kv_cache.usage == 0.0
    step = schedule(scheduler, 1)
    assert rows(step) == [("a", 0, 3, True), ("b", 0, 3, True), ("c", 0, 1, True)]
    assert len(step.plan.finished_slots) == 2


def test_preempt_all_of_an_idle_scheduler_is_nothing() -> None:
    scheduler = make_scheduler(make_request("a", 1))
    assert scheduler.preempt_all() == []
    assert ids(scheduler.waiting) == ["a"]


# The integrity check


def test_the_integrity_check_finds_a_request_in_two_queues() -> None:
    request = make_request("a", 1)
    scheduler = make_scheduler(request)
    schedule(scheduler)
    scheduler.waiting.add_preempted(request)
    with pytest.raises(AssertionError, match="two queues"):
        scheduler.check_integrity()


def test_the_integrity_check_finds_a_slot_lost_or_used_twice() -> None:
    first, second = make_request("a", 1), make_request("b", 1)
    scheduler = make_scheduler(first, second)
    schedule(scheduler)
    slot, first.slot = first.slot, second.slot
    with pytest.raises(AssertionError, match="slot is lost or doubled"):
        scheduler.check_integrity()
    first.slot = slot
    scheduler.check_integrity()


def test_the_integrity_check_finds_a_wrong_status() -> None:
    request = make_request("a", 1)
    scheduler = make_scheduler(request)
    schedule(scheduler)
    request.status = RequestStatus.FINISHED
    with pytest.raises(AssertionError, match="in running"):
        scheduler.check_integrity()
    waiting = make_request("b", 1)
    scheduler = make_scheduler(waiting)
    waiting.status = RequestStatus.RUNNING
    with pytest.raises(AssertionError, match="in waiting"):
        scheduler.check_integrity()


def test_the_integrity_check_finds_a_waiting_request_that_holds_something() -> None:
    request = make_request("a", 1)
    scheduler = make_scheduler(request)
    request.block_ids = [0]
    with pytest.raises(AssertionError, match="waits with blocks"):
        scheduler.check_integrity()
    request.block_ids, request.slot = [], 0
    with pytest.raises(AssertionError, match="waits with a slot"):
        scheduler.check_integrity()


def test_a_plan_counts_its_tokens() -> None:
    assert StepPlan(plan_id=0, slots=[0, 1], num_scheduled_tokens=[3, 4]).num_tokens == 7
