"""Whose turn it is under the policy ``priority``, and fairness between long and short prompts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.unit.core.core_parts import (
    add,
    make_core,
    make_driver,
    make_request,
    make_source,
    plan_step,
    run_step,
    settle as settle_plan,
    solo_tokens,
    take,
)
from tests.unit.core.scheduler_parts import end, ids, make_scheduler, rows, schedule, settle
from trio_engine.outputs import FinishReason
from trio_engine.requests import PauseMode

if TYPE_CHECKING:
    from trio_engine.core.request import Request


def make_prioritized(
    request_id: str, prompt: int, priority: int = 0, *, arrival_time: float = 0.0
) -> Request:
    fields = {"priority": priority, "arrival_time": arrival_time}
    return make_request(request_id, prompt, source_fields=fields)


# Who is next


def test_the_lowest_value_is_served_first_and_equals_by_their_arrival() -> None:
    scheduler = make_scheduler(
        make_prioritized("low", 1, 5),
        make_prioritized("late", 1, 0, arrival_time=20.0),
        make_prioritized("early", 1, 0, arrival_time=10.0),
        make_prioritized("high", 1, -1, arrival_time=30.0),
        max_num_seqs=2,
        policy="priority",
    )
    assert ids(scheduler.waiting) == ["high", "early", "late", "low"]
    assert ids(schedule(scheduler).requests) == ["high", "early"]
    assert ids(scheduler.waiting) == ["late", "low"]


def test_of_equal_priority_and_arrival_the_first_admitted_is_first() -> None:
    names = [f"r{number}" for number in range(9)]
    scheduler = make_scheduler(
        *(make_prioritized(name, 1) for name in names), max_num_seqs=9, policy="priority"
    )
    assert ids(schedule(scheduler).requests) == names


def test_first_come_first_served_looks_neither_at_priority_nor_at_arrival() -> None:
    scheduler = make_scheduler(
        make_prioritized("first", 1, 5, arrival_time=9.0), make_prioritized("second", 1, -5)
    )
    assert ids(schedule(scheduler).requests) == ["first", "second"]


def test_whom_there_is_no_room_for_nobody_overtakes_but_one_of_higher_priority() -> None:
    scheduler = make_scheduler(
        make_prioritized("a", 5), make_prioritized("big", 6), num_blocks=10, policy="priority"
    )
    settle(schedule(scheduler))
    scheduler.waiting.add(make_prioritized("small", 1))
    assert ids(schedule(scheduler, 1).requests) == ["a"]
    scheduler.waiting.add(make_prioritized("urgent", 1, -1))
    assert ids(schedule(scheduler, 2).resumed) == ["urgent"]
    assert ids(scheduler.waiting) == ["big", "small"]


def test_a_running_request_is_not_preempted_for_a_slot() -> None:
    scheduler = make_scheduler(make_prioritized("a", 1, 9), max_num_seqs=1, policy="priority")
    settle(schedule(scheduler))
    scheduler.waiting.add(make_prioritized("urgent", 1, -9))
    assert ids(schedule(scheduler, 1).requests) == ["a"]


def test_the_budget_goes_to_running_requests_by_turn() -> None:
    scheduler = make_scheduler(make_prioritized("low", 9, 1), budget=4, policy="priority")
    schedule(scheduler)
    scheduler.waiting.add(make_prioritized("high", 3, 0))
    # The one that runs already has the first word in the step in which the other one starts.
    assert rows(schedule(scheduler, 1)) == [("low", 4, 4, False)]
    assert rows(schedule(scheduler, 2)) == [("low", 8, 1, True), ("high", 0, 3, True)]


def test_rows_that_decode_leave_half_of_a_step_to_an_earlier_prompt() -> None:
    lows = [make_prioritized(f"low{n}", 1, 1) for n in range(6)]
    scheduler = make_scheduler(*lows, budget=8, policy="priority")
    settle(schedule(scheduler))
    scheduler.waiting.add(make_prioritized("high", 20, 0))
    settle(schedule(scheduler, 1))  # it starts with what six others leave
    step = schedule(scheduler, 2)
    assert ids(step.decodes.requests) == ["low0", "low1", "low2", "low3"]
    assert rows(step)[4:] == [("high", 2, 4, False)]


# Who is preempted


@pytest.mark.known_fault(kind="forgetful-preemption")
def test_the_lowest_priority_is_preempted_and_of_equals_the_latest_arrival() -> None:
    scheduler = make_scheduler(
        make_prioritized("low", 2, 1),
        make_prioritized("late", 2, 0, arrival_time=2.0),
        make_prioritized("early", 2, 0, arrival_time=1.0),
        num_blocks=6,
        policy="priority",
    )
    settle(schedule(scheduler))
    step = schedule(scheduler, 1)
    assert (ids(step.requests), ids(step.preempted)) == (["early", "late"], ["low"])
    settle(step)
    step = schedule(scheduler, 2)
    assert (ids(step.requests), ids(step.preempted)) == (["early"], ["late"])
    assert ids(scheduler.waiting) == ["late", "low"]


def test_a_newcomer_of_higher_priority_goes_before_a_preempted_request() -> None:
    low, high = make_prioritized("low", 2, 1), make_prioritized("high", 3, 0)
    scheduler = make_scheduler(low, high, num_blocks=5, policy="priority")
    settle(schedule(scheduler))
    assert ids(schedule(scheduler, 1).preempted) == ["low"]
    scheduler.waiting.add(make_prioritized("middle", 2, 0, arrival_time=1.0))
    end(scheduler, high)
    low.num_unsettled_tokens = 0
    assert ids(schedule(scheduler, 2).resumed) == ["middle", "low"]


def test_a_new_request_that_may_not_start_does_not_hold_up_a_preempted_one() -> None:
    """Or a pause that lets started requests finish would never come to rest."""
    core = make_core(num_blocks=6, scheduling_policy="priority")
    core.add(make_source("a", 3))
    core.add(make_source("b", 2, source_fields={"priority": 1}))
    run_step(core, 7, 8)
    run_step(core, 7)
    assert core.statistics().num_preemptions == 1
    core.add(make_source("urgent", 1, source_fields={"priority": -1}))
    core.pause(PauseMode.WAIT)
    core.abort(0, ["a"])
    plan = plan_step(core)
    assert [row.request_id for row in plan.new_rows] == ["b"]


# No livelock


@pytest.mark.known_fault(kind="forgetful-preemption")
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_requests_that_cannot_both_fit_all_come_to_their_end(
    policy: str, block_size: int, pipeline_depth: int
) -> None:
    """Each of them fits alone; together they preempt each other again and again."""
    driver = make_driver(
        num_blocks=24 // block_size,
        block_size=block_size,
        max_model_len=24,
        pipeline_depth=pipeline_depth,
        max_num_batched_tokens=4,
        scheduling_policy=policy,
    )
    sources = [
        make_source(f"r{n}", [n, 1, 2], max_tokens=20, source_fields={"priority": n % 3})
        for n in range(6)
    ]
    logs = [add(driver, source) for source in sources]
    driver.run_until_idle(max_steps=600)
    assert driver.core.statistics().num_preemptions >= 5
    for source, log in zip(sources, logs, strict=True):
        assert log.finish_reason is FinishReason.LENGTH
        assert log.token_ids == solo_tokens(source)


@pytest.mark.known_fault(kind="request-that-never-fits")
def test_a_prompt_that_outgrows_the_cache_alone_ends_by_its_length_and_holds_up_nobody() -> None:
    """8 blocks of 4 hold a request of 33 tokens; no step is empty while anybody can run."""
    core = make_core(num_blocks=8, block_size=4, max_num_seqs=8)
    core.add(make_source("never", 40))
    core.add(make_source("outgrows", 20, max_tokens=40))
    core.add(make_source("small", 4, max_tokens=2))
    (refused,) = take(core)
    assert (refused.request_id, refused.finish_reason) == ("never", FinishReason.ERROR)
    finished = {}
    for _ in range(200):
        if not core.has_requests:
            break
        plan = plan_step(core)
        settle_plan(core, plan, *[7] * len(plan.slots))
        for output in take(core):
            if output.finish_reason is not None:
                finished[output.request_id] = output.finish_reason
    assert finished == {"outgrows": FinishReason.LENGTH, "small": FinishReason.LENGTH}


# Long prompts


def test_of_two_rows_that_need_a_block_at_once_the_last_by_turn_goes_without() -> None:
    low = make_prioritized("low", 2, 1)
    scheduler = make_scheduler(low, num_blocks=10, policy="priority")
    settle(schedule(scheduler))
    scheduler.waiting.add(make_prioritized("high", 2, 0))  # joins the one that decodes already
    for plan_id in range(1, 4):
        step = schedule(scheduler, plan_id)
        assert step.preempted == []
        settle(step)
    step = schedule(scheduler, 4)
    assert (ids(step.preempted), ids(step.requests)) == (["low"], ["high"])
    assert [slot for slot, _ in step.plan.new_block_ids] == list(step.plan.slots)


def test_a_long_prompt_leaves_room_for_others_in_each_step() -> None:
    scheduler = make_scheduler(
        make_request("long", 20), make_request("short", 3), budget=8, long_prefill=4
    )
    assert rows(schedule(scheduler)) == [("long", 0, 4, False), ("short", 0, 3, True)]
    assert rows(schedule(scheduler, 1)) == [("short", None, 1, True), ("long", 4, 4, False)]


def test_two_long_prompts_are_computed_side_by_side() -> None:
    scheduler = make_scheduler(
        make_request("a", 10), make_request("b", 10), budget=8, long_prefill=4
    )
    steps = [schedule(scheduler, plan_id) for plan_id in range(3)]
    assert [rows(step) for step in steps] == [
        [("a", 0, 4, False), ("b", 0, 4, False)],
        [("a", 4, 4, False), ("b", 4, 4, False)],
        [("a", 8, 2, True), ("b", 8, 2, True)],
    ]


def test_a_replay_is_cut_as_a_prompt_is() -> None:
    request = make_request("a", 6)
    scheduler = make_scheduler(request, long_prefill=4)
    for plan_id in range(3):
        settle(schedule(scheduler, plan_id))
    scheduler.preempt_all()
    assert rows(schedule(scheduler, 3)) == [("a", 0, 4, False)]


# What a step costs


def test_an_unchanged_batch_is_the_same_object_in_every_plan() -> None:
    scheduler = make_scheduler(make_request("a", 2), make_request("b", 3))
    settle(schedule(scheduler))
    steps = [schedule(scheduler, 1), schedule(scheduler, 2)]
    first, second = (step.plan for step in steps)
    assert first.slots is second.slots
    assert first.num_scheduled_tokens is second.num_scheduled_tokens
    for step in steps:
        settle(step)
    scheduler.waiting.add(make_request("c", 1))
    third = schedule(scheduler, 3).plan
    assert list(third.slots) == [*first.slots, 2]
    assert list(first.slots) == [0, 1]  # a plan that was handed over does not change


def test_thousands_come_and_go_while_a_step_is_planned_in_the_order_of_the_rest() -> None:
    rng = random.Random(7)
    requests = [
        make_prioritized(f"r{n}", 1, rng.randint(-3, 3), arrival_time=rng.random())
        for n in range(3000)
    ]
    scheduler = make_scheduler(*requests, max_num_seqs=4, policy="priority")
    leaving = set(rng.sample(range(3000), 2500))
    for number in leaving:
        scheduler.remove(requests[number])
    staying = [request for n, request in enumerate(requests) if n not in leaving]
    expected = sorted(staying, key=lambda r: (r.priority, r.arrival_time))
    assert schedule(scheduler).requests == expected[:4]
    assert len(scheduler.waiting) == len(expected) - 4
