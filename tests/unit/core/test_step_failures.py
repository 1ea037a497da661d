"""Failed plans (rule 6): who ends, who is planned again, and what of tokens in flight.

By hand where the order of moves is the point, else with the executor that checks every block and
token, whose solo run is the oracle.
"""

from __future__ import annotations

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
from tests.unit.core.pipeline_parts import make_planted_driver, preempt_in_flight
from trio_engine.errors import RequestStepError, StepError
from trio_engine.outputs import EngineCoreEventType, FinishReason


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("moment", ["launch", "collect"])
@pytest.mark.parametrize("plan", [0, 1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("num_blocks", [21, 64])
def test_a_failed_plan_ends_the_row_at_fault_and_no_other_row_notices(
    launches_ahead: bool, moment: str, plan: int, depth: int, budget: int, num_blocks: int
) -> None:
    driver = make_planted_driver(
        {plan: moment},
        launches_ahead=launches_ahead,
        depth=depth,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
    )
    sources = [make_source(name, [ord(name)] * 5, max_tokens=14) for name in "abc"]
    logs = [add(driver, source) for source in sources]
    driver.run_until_idle()
    driver.core.check_integrity()
    failed = [log for log in logs if log.finish_reason is FinishReason.ERROR]
    assert len(failed) == 1
    for log, source in zip(logs, sources, strict=True):
        solo = solo_tokens(source)
        assert log.token_ids == (solo[: len(log.token_ids)] if log in failed else solo)
    statistics = driver.core.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks


@pytest.mark.parametrize("second", ["launch", "collect"])
@pytest.mark.parametrize(
    ("first", "launches_ahead"), [("launch", False), ("collect", False), ("collect", True)]
)
def test_a_plan_that_fails_behind_a_failed_one_is_not_worth_a_word(
    first: str, second: str, launches_ahead: bool
) -> None:
    driver = make_planted_driver(
        {3: first, 4: second}, launches_ahead=launches_ahead, num_blocks=64
    )
    sources = [make_source(name, [ord(name)] * 5, max_tokens=14) for name in "abc"]
    logs = [add(driver, source) for source in sources]
    driver.run_until_idle()
    reasons = [log.finish_reason for log in logs]
    assert reasons == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    assert [log.token_ids for log in logs[1:]] == [solo_tokens(source) for source in sources[1:]]


def test_tokens_settled_before_a_failure_are_kept_and_none_is_heard_twice() -> None:
    core = make_core()
    core.add(make_source("a", max_tokens=9))
    core.add(make_source("b", max_tokens=9))
    run_step(core, 40, 50)
    first, second = plan_step(core), plan_step(core)
    settle(core, first, 41, 51)
    third = plan_step(core)
    core.fail(second.plan_id, RequestStepError("planted", slots=[second.slots[1]]))
    core.check_integrity()
    assert core.num_plans_in_flight == 0
    outputs = {o.request_id: o for o in take(core)}
    assert (outputs["a"].new_token_ids, outputs["a"].finish_reason) == ([40, 41], None)
    assert outputs["b"].new_token_ids == [50, 51]
    assert outputs["b"].finish_reason is FinishReason.ERROR
    again = plan_step(core)
    assert (again.reset, again.plan_id) == (True, third.plan_id + 1)
    (row,) = again.new_rows
    assert (row.token_ids, row.num_computed_tokens) == ([0, 1, 2, 40, 41], 4)
    settle(core, again, 42)
    assert take(core)[0].new_token_ids == [42]


def test_a_plan_behind_a_failed_one_is_not_awaited_any_more() -> None:
    core = make_core()
    core.add(make_source("a"))
    core.add(make_source("b"))
    first, second = plan_step(core), plan_step(core)
    core.fail(first.plan_id, RequestStepError("planted", slots=[first.slots[0]]))
    with pytest.raises(StepError, match=f"result of plan {second.plan_id} out of turn"):
        settle(core, second, 7, 8)


def test_a_failure_names_several_rows_and_each_once(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core()
    for name in "abc":
        core.add(make_source(name))
    plan = plan_step(core)
    core.fail(
        plan.plan_id,
        RequestStepError("planted", slots=[plan.slots[0], plan.slots[2], plan.slots[0]]),
    )
    core.check_integrity()
    (message,) = take_messages(core)
    assert sorted(o.request_id for o in message.outputs) == ["a", "c"]
    assert {o.finish_reason for o in message.outputs} == {FinishReason.ERROR}
    assert message.finished_requests == {"a", "c"}
    assert "step_failed request_id='a' reason='planted'" in caplog.text
    assert [row.request_id for row in plan_step(core).new_rows] == ["b"]


def test_a_failure_of_a_row_that_has_ended_since_ends_nobody() -> None:
    core = make_core()
    core.add(make_source("a", [1]))
    core.add(make_source("b", [2]))
    plan = plan_step(core)
    core.abort(0, ["a"])
    core.add(make_source("a", [3], max_tokens=1))
    core.fail(plan.plan_id, RequestStepError("planted", slots=[plan.slots[0]]))
    core.check_integrity()
    assert take(core) == []
    again = plan_step(core)
    assert sorted(row.token_ids for row in again.new_rows) == [[2], [3]]


def test_a_failure_of_a_row_that_was_preempted_since_ends_it() -> None:
    core = make_core(num_blocks=7)
    first, _ = preempt_in_flight(core)
    core.fail(first.plan_id, RequestStepError("planted", slots=[first.slots[1]]))
    core.check_integrity()
    assert take(core)[1].finish_reason is FinishReason.ERROR
    again = plan_step(core)
    assert [row.request_id for row in again.new_rows] == ["a"]


def test_a_row_preempted_behind_a_failed_plan_is_computed_from_its_start() -> None:
    core = make_core(num_blocks=7, enable_prefix_caching=False)
    first, _ = preempt_in_flight(core)
    core.fail(first.plan_id, RequestStepError("planted", slots=[first.slots[0]]))
    (row,) = plan_step(core).new_rows
    assert (row.request_id, row.num_computed_tokens) == ("b", 0)
    assert row.token_ids == [0, 1, 50]


@pytest.mark.parametrize("slots", [[], [5], [0, 5]])
def test_a_failure_that_names_no_row_of_its_plan_ends_the_engine(slots: list[int]) -> None:
    core = make_core()
    core.add(make_source("a"))
    plan = plan_step(core)
    assert list(plan.slots) == [0]
    with pytest.raises(StepError, match="plan 0 failed for slots") as caught:
        core.fail(0, RequestStepError("planted", slots=slots))
    assert isinstance(caught.value.__cause__, RequestStepError)


def test_a_failure_out_of_turn_ends_the_engine() -> None:
    core = make_core()
    with pytest.raises(StepError, match="failure of plan 0 out of turn"):
        core.fail(0, RequestStepError("planted", slots=[0]))
    core.add(make_source("a"))
    plan_step(core)
    with pytest.raises(StepError, match="failure of plan 1 out of turn"):
        core.fail(plan_step(core).plan_id, RequestStepError("planted", slots=[0]))


def test_a_step_that_fails_again_and_again_ends_one_request_each_time() -> None:
    core = make_core()
    for name in "abc":
        core.add(make_source(name))
    for _ in "abc":
        plan = plan_step(core)
        core.fail(plan.plan_id, RequestStepError("planted", slots=[plan.slots[0]]))
        core.check_integrity()
    assert core.schedule() is None
    assert {o.request_id for o in take(core)} == {"a", "b", "c"}


def test_prefill_stats_and_events_survive_a_failed_first_step() -> None:
    core = make_core()
    core.add(make_source("a", 4))
    core.add(make_source("b", 4))
    plan = plan_step(core)
    core.fail(plan.plan_id, RequestStepError("planted", slots=[plan.slots[1]]))
    take(core)
    run_step(core, 7)
    (output,) = take(core)
    assert output.prefill_stats is not None
    assert event_types(output) == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
