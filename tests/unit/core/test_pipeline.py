"""The pipeline's rules, one by one: two plans in flight, ends in between.

By hand where the order of moves is the point, else with the executor that checks every block and
token, whose solo run is the oracle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.core.core_parts import (
    add,
    event_types,
    make_core,
    make_source,
    plan_step,
    run_step,
    settle,
    solo_tokens,
    take,
    take_messages,
)
from tests.unit.core.pipeline_parts import STOP_ID, make_planted_driver, preempt_in_flight
from trio_engine.core.plan import NO_TOKEN
from trio_engine.errors import StepError
from trio_engine.outputs import EngineCoreEventType, FinishReason
from trio_engine.requests import PauseMode

if TYPE_CHECKING:
    from trio_engine.core.plan import StepPlan


# Plans are numbered and settled in order


def test_plans_are_numbered_by_one_and_a_step_without_rows_uses_no_number() -> None:
    core = make_core()
    assert core.schedule() is None
    core.add(make_source("a", max_tokens=1))
    assert run_step(core, 7).plan_id == 0
    assert core.schedule() is None
    core.add(make_source("b", max_tokens=1))
    assert run_step(core, 7).plan_id == 1


def test_two_plans_may_be_unsettled_and_never_three() -> None:
    core = make_core()
    core.add(make_source("a"))
    plan_step(core)
    plan_step(core)
    with pytest.raises(AssertionError, match="two plans are unsettled"):
        core.schedule()


def test_results_settle_in_the_order_of_the_plans() -> None:
    core = make_core()
    core.add(make_source("a"))
    first, second = plan_step(core), plan_step(core)
    with pytest.raises(StepError, match=f"result of plan {second.plan_id} out of turn"):
        settle(core, second, 8)
    settle(core, first, 7)
    settle(core, second, 8)
    assert take(core)[0].new_token_ids == [7, 8]


# Rule 2: a result is for the request that was planned, if it still lives


def test_tokens_of_an_aborted_request_go_nowhere_with_two_plans_in_flight() -> None:
    core = make_core()
    core.add(make_source("x"))
    core.add(make_source("y"))
    first, second = plan_step(core), plan_step(core)
    core.abort(0, ["x"])
    core.check_integrity()
    settle(core, first, 7, 8)
    settle(core, second, 7, 8)
    (message,) = take_messages(core)
    assert [(o.request_id, o.new_token_ids) for o in message.outputs] == [("y", [8, 8])]
    assert message.finished_requests == {"x"}


@pytest.mark.known_fault(kind="late-abort")
def test_a_late_token_does_not_reach_the_next_request_under_its_id() -> None:
    """Abort in flight, then the same id again, started while the old row is still computed."""
    core = make_core()
    core.add(make_source("x", [1, 2], max_tokens=9))
    old = plan_step(core)
    core.abort(0, ["x"])
    core.add(make_source("x", [3], max_tokens=2))
    new = plan_step(core)
    assert [row.token_ids for row in new.new_rows] == [[3]]
    assert new.finished_slots == list(old.slots) == list(new.slots)
    settle(core, old, 50)
    settle(core, new, 60)
    run_step(core, 61)
    (message,) = take_messages(core)
    assert [(o.new_token_ids, o.finish_reason) for o in message.outputs] == [
        ([60, 61], FinishReason.LENGTH)
    ]


def test_a_stop_token_wastes_one_row_whose_token_goes_nowhere() -> None:
    core = make_core()
    core.add(make_source("x", stop_token_ids=[STOP_ID]))
    first, second = plan_step(core), plan_step(core)
    settle(core, first, STOP_ID)
    assert core.schedule() is None
    settle(core, second, 8)
    (output,) = take(core)
    assert (output.new_token_ids, output.stop_reason) == ([STOP_ID], STOP_ID)
    assert output.finish_reason is FinishReason.STOP


def test_an_abort_between_two_plans_leaves_no_row_in_the_second() -> None:
    core = make_core()
    core.add(make_source("x"))
    core.add(make_source("y"))
    first = plan_step(core)
    core.abort(0, ["x"])
    second = plan_step(core)
    assert list(second.slots) == [first.slots[1]]
    assert second.finished_slots == [first.slots[0]]
    settle(core, first, 7, 8)
    settle(core, second, 9)
    assert [(o.request_id, o.new_token_ids) for o in take(core)] == [("y", [8, 9])]


# Rule 3: freed blocks go to the next plan at once


def test_blocks_of_an_aborted_row_are_used_while_its_plan_is_in_flight() -> None:
    core = make_core(num_blocks=4)
    core.add(make_source("x", 4))
    old = plan_step(core)
    core.add(make_source("y", 4, max_tokens=1))
    assert core.schedule() is None
    core.abort(0, ["x"])
    new = plan_step(core)
    assert sorted(new.new_rows[0].block_ids) == sorted(old.new_rows[0].block_ids)
    settle(core, old, 7)
    settle(core, new, 8)
    assert [(o.request_id, o.new_token_ids) for o in take(core)] == [("y", [8])]


# Rule 4: limits are planned


@pytest.mark.parametrize(
    ("options", "num_tokens"), [({"max_tokens": 3}, 3), ({"max_tokens": None}, 4)]
)
def test_a_limit_wastes_no_row(options: dict[str, Any], num_tokens: int) -> None:
    core = make_core(max_model_len=6)
    core.add(make_source("a", 2, **options))
    in_flight: list[StepPlan] = []
    num_plans = 0
    while core.has_requests:
        while core.num_plans_in_flight < 2 and (plan := core.schedule()) is not None:
            in_flight.append(plan)
            num_plans += 1
        settle(core, in_flight.pop(0), 100 + num_plans)
    assert (num_plans, core.num_plans_in_flight) == (num_tokens, 0)
    (output,) = take(core)
    assert (len(output.new_token_ids), output.finish_reason) == (num_tokens, FinishReason.LENGTH)


# Rule 5: preemption with a token in flight


@pytest.mark.known_fault(kind="forgetful-preemption")
def test_the_token_of_a_preempted_row_counts_and_is_part_of_its_replay() -> None:
    core = make_core(num_blocks=7)
    first, second = preempt_in_flight(core)
    settle(core, first, 41, 51)
    assert {o.request_id: o.new_token_ids for o in take(core)} == {"a": [40, 41], "b": [50, 51]}
    settle(core, second, 42)
    core.abort(0, ["a"])
    (row,) = plan_step(core).new_rows
    assert (row.request_id, row.token_ids) == ("b", [0, 1, 50, 51])


@pytest.mark.known_fault(kind="forgetful-preemption")
def test_the_token_of_a_preempted_row_may_stop_it() -> None:
    core = make_core(num_blocks=7)
    first, second = preempt_in_flight(core)
    settle(core, first, 41, STOP_ID)
    a, b = take(core)
    assert a.finish_reason is None
    assert (b.new_token_ids, b.finish_reason) == ([50, STOP_ID], FinishReason.STOP)
    assert event_types(b)[-1] is EngineCoreEventType.PREEMPTED
    settle(core, second, 42)
    core.abort(0, ["a"])
    assert core.schedule() is None
    assert not core.has_requests


def test_the_token_of_a_preempted_row_may_be_its_last_by_length() -> None:
    """A row that ends with the step in flight still needs no block: only others can preempt it."""
    core = make_core(num_blocks=7)
    core.add(make_source("a", 3, max_tokens=9))
    core.add(make_source("b", 2, max_tokens=2))
    run_step(core, 40, 50)
    first, second = plan_step(core), plan_step(core)
    assert core.statistics().num_preemptions == 1
    settle(core, first, 41, 51)
    assert take(core)[1].finish_reason is FinishReason.LENGTH
    settle(core, second, 42)
    assert [o.request_id for o in take(core)] == ["a"]


@pytest.mark.known_fault(kind="forgetful-preemption")
def test_an_abort_of_a_preempted_row_drops_its_token() -> None:
    core = make_core(num_blocks=7)
    first, second = preempt_in_flight(core)
    core.abort(0, ["b"])
    settle(core, first, 41, 51)
    settle(core, second, 42)
    assert [o.request_id for o in take(core)] == ["a"]


@pytest.mark.known_fault(kind="forgetful-preemption")
def test_a_preempted_request_is_not_planned_again_while_its_token_is_in_flight() -> None:
    """ "z" is at its planned limit, so the step that preempts "r" is empty and another follows."""
    core = make_core(num_blocks=7)
    core.add(make_source("z", 3, max_tokens=2))
    core.add(make_source("r", 2, max_tokens=3))
    run_step(core, 40, 50)
    in_flight = plan_step(core)
    assert core.schedule() is None
    assert core.statistics().num_preemptions == 1
    assert core.schedule() is None
    assert core.statistics().num_running_requests == 1
    settle(core, in_flight, 51, 41)  # "r" decodes on, "z" is at its last token
    plan = plan_step(core)
    assert [row.token_ids for row in plan.new_rows] == [[0, 1, 50, 51]]
    settle(core, plan, 52)
    assert {o.request_id: (o.new_token_ids, o.finish_reason) for o in take(core)} == {
        "z": ([40, 41], FinishReason.LENGTH),
        "r": ([50, 51, 52], FinishReason.LENGTH),
    }


@pytest.mark.known_fault(kind="forgetful-preemption")
@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("num_blocks", [23, 24, 30, 37])
def test_preempted_requests_generate_what_they_generate_alone(
    num_blocks: int, budget: int, launches_ahead: bool
) -> None:
    """Neither of the two can finish beside the other; replays are cut in chunks of 4."""
    driver = make_planted_driver(
        {},
        launches_ahead=launches_ahead,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
    )
    sources = [make_source(name, [ord(name)] * 3, max_tokens=20) for name in "abc"]
    logs = [add(driver, source) for source in sources]
    driver.run_until_idle()
    driver.core.check_integrity()
    assert driver.core.statistics().num_preemptions > 0
    for log, source in zip(logs, sources, strict=True):
        assert log.token_ids == solo_tokens(source)
        assert log.finish_reason is FinishReason.LENGTH
    assert driver.core.statistics().num_free_blocks == num_blocks


# Rule 7: a pause lets what is in flight settle


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.WAIT])
def test_tokens_in_flight_at_a_pause_are_told(mode: PauseMode) -> None:
    core = make_core()
    core.add(make_source("a", max_tokens=2))
    first, second = plan_step(core), plan_step(core)
    core.pause(mode)
    settle(core, first, 7)
    assert core.schedule() is None
    assert not core.is_quiescent
    settle(core, second, 8)
    assert core.is_quiescent
    (output,) = take(core)
    assert (output.new_token_ids, output.finish_reason) == ([7, 8], FinishReason.LENGTH)


def test_rows_that_compute_a_chunk_have_no_token_to_settle() -> None:
    core = make_core(max_num_batched_tokens=4)
    core.add(make_source("a", 2, max_tokens=9))
    core.add(make_source("b", 6))
    first, second = plan_step(core), plan_step(core)
    settle(core, first, 7, NO_TOKEN)
    settle(core, second, 8, NO_TOKEN)
    assert [(o.request_id, o.new_token_ids) for o in take(core)] == [("a", [7, 8])]
    run_step(core, 9, 50)
    assert [(o.request_id, o.new_token_ids) for o in take(core)] == [("a", [9]), ("b", [50])]
