"""The rows of which nothing is counted one by one: who is among them, and what they are told."""

from __future__ import annotations

import pytest

from tests.unit.core.core_parts import (
    make_core,
    make_request,
    make_source,
    plan_step,
    run_step,
    settle,
    take,
)
from tests.unit.core.scheduler_parts import ids, make_scheduler, schedule, settle as settle_tokens
from trio_engine.core.decode_batch import DecodeBatch
from trio_engine.errors import StepError
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RepetitionDetectionParams


def test_a_member_s_counts_follow_from_the_number_of_plans() -> None:
    request, batch = make_request("r", 3), DecodeBatch()
    request.num_planned_tokens, request.num_unsettled_tokens = 3, 1
    batch.num_plans = 5
    batch.join(request, num_plain_tokens=6)
    batch.num_plans += 2
    request.token_ids.append(100)
    assert batch.num_planned_tokens(request) == 5
    batch.leave(request)
    assert (request.num_planned_tokens, request.num_unsettled_tokens) == (5, 2)
    batch.leave(request)  # who is no member has left
    assert batch.num_departures == 1


def test_a_member_is_due_for_the_plan_before_which_its_room_is_full() -> None:
    request, batch = make_request("r", 3), DecodeBatch()
    request.num_planned_tokens, request.num_unsettled_tokens = 3, 1
    batch.join(request, num_plain_tokens=5)
    due = []
    for _ in range(3):
        due.append(batch.take_due())
        batch.num_plans += 1
    assert due == [[], [], [request]]
    batch.extend(request, num_plain_tokens=6)
    assert batch.take_due() == [request]


def test_who_tells_more_than_tokens_stands_behind_those_who_do_not() -> None:
    requests = [make_request("logprobs", 2, logprobs=1), make_request("plain", 2)]
    scheduler = make_scheduler(*requests)
    settle_tokens(schedule(scheduler))
    decodes = schedule(scheduler, 1).decodes
    assert ids(decodes.requests) == ["plain", "logprobs"]
    assert ids(decodes.plain) == ["plain"]


def test_who_comes_to_its_last_token_is_planned_outside_of_the_batch() -> None:
    scheduler = make_scheduler(make_request("a", 2, max_tokens=3), make_request("b", 2))
    members = []
    for plan_id in range(3):
        step = schedule(scheduler, plan_id)
        settle_tokens(step)
        members.append((ids(step.decodes.requests), ids(step.requests)))
    assert members == [([], ["a", "b"]), (["a", "b"], ["a", "b"]), (["b"], ["b", "a"])]


def test_who_loses_its_slot_in_a_plan_gets_no_block_in_it() -> None:
    """One block is left when "a", by its last token no member any more, and "b" need one each."""
    a, b = make_request("a", 2, max_tokens=4), make_request("b", 2)
    scheduler = make_scheduler(a, b, num_blocks=9)
    for plan_id in range(3):
        settle_tokens(schedule(scheduler, plan_id))
    step = schedule(scheduler, 3)
    assert (ids(step.requests), ids(step.preempted)) == (["a"], ["b"])
    assert step.plan.new_block_ids == [(a.slot, a.block_ids[-1:])]


def test_the_batch_has_half_of_a_step_s_tokens_at_most() -> None:
    scheduler = make_scheduler(*[make_request(name, 1) for name in "abc"], budget=5)
    settle_tokens(schedule(scheduler))
    step = schedule(scheduler, 1)
    assert (ids(step.decodes.requests), ids(step.requests)) == (["a", "b"], ["a", "b", "c"])


def test_a_preempted_request_resumes_beside_a_batch_of_which_nobody_is_due() -> None:
    scheduler = make_scheduler(make_request("a", 1), make_request("b", 1), block_size=16)
    settle_tokens(schedule(scheduler))
    scheduler.preempt_all()
    scheduler.max_num_batched_tokens = 2  # only one of them can resume
    settle_tokens(schedule(scheduler, 1))
    scheduler.max_num_batched_tokens = 64
    step = schedule(scheduler, 2, admit=False)
    assert (ids(step.decodes.requests), ids(step.resumed)) == (["a"], ["b"])


def test_blocks_of_the_output_can_be_found_while_their_request_runs() -> None:
    core = make_core(block_size=2)
    core.add(make_source("a", 2))
    for token_id in range(40, 46):
        run_step(core, token_id)
    assert core.statistics().num_cached_blocks == 3


def test_a_repetition_ends_a_member() -> None:
    core = make_core()
    pattern = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=3)
    core.add(make_source("a", 2, repetition_detection=pattern))
    for _ in range(3):
        run_step(core, 40)
    (output,) = take(core)
    assert output.finish_reason is FinishReason.REPETITION


def test_trace_headers_of_a_member_are_told() -> None:
    core = make_core()
    core.add(make_source("a", 2, source_fields={"trace_headers": {"traceparent": "t"}}))
    run_step(core, 40)
    take(core)
    run_step(core, 41)
    (output,) = take(core)
    assert output.trace_headers == {"traceparent": "t"}


def test_the_gauges_go_to_a_client_that_is_told_a_token() -> None:
    core = make_core(num_clients=2)
    core.add(make_source("a", 2, client_index=0))
    core.add(make_source("b", 2, client_index=1))
    run_step(core, 40, 50)
    in_flight = plan_step(core)
    core.abort(0, ["a"])
    take(core, 0), take(core, 1)
    settle(core, in_flight, 41, 51)
    assert core.outboxes[0].is_empty
    (message,) = core.outboxes[1].take(0.0)
    assert message.scheduler_stats is not None


def test_rows_of_several_clients_get_their_own_tokens() -> None:
    core = make_core(num_clients=2)
    core.add(make_source("a", 2, client_index=1))
    core.add(make_source("b", 2, client_index=0))
    run_step(core, 40, 50)
    take(core, 0), take(core, 1)
    run_step(core, 41, 51)
    told = [[(o.request_id, o.new_token_ids) for o in take(core, client)] for client in (0, 1)]
    assert told == [[("b", [51])], [("a", [41])]]


def test_of_rows_that_were_in_flight_together_one_may_have_left_since() -> None:
    core = make_core()
    for request_id in ("a", "b", "c"):
        core.add(make_source(request_id, 2))
    run_step(core, 40, 50, 60)
    in_flight = plan_step(core)
    core.abort(0, ["b"])
    settle(core, in_flight, 41, 51, 61)
    told = {o.request_id: o.new_token_ids for o in take(core)}
    assert (told["a"], told["c"]) == ([40, 41], [60, 61])
    assert told.get("b", []) == []
    assert core.statistics().num_running_requests == 2


def test_a_stop_token_before_min_tokens_ends_no_member() -> None:
    core = make_core()
    core.add(make_source("a", 2, stop_token_ids=[9], min_tokens=3))
    run_step(core, 9)
    run_step(core, 9)
    run_step(core, 9)
    (output,) = take(core)
    assert (output.new_token_ids, output.finish_reason) == ([9, 9, 9], FinishReason.STOP)


@pytest.mark.parametrize("token_id", [512, -1])
def test_a_token_that_there_is_not_is_the_executor_s_fault(token_id: int) -> None:
    core = make_core()
    core.add(make_source("a", 2))
    core.add(make_source("b", 2))
    run_step(core, 40, 50)
    in_flight = plan_step(core)
    with pytest.raises(StepError, match=rf"plan 1 gave token {token_id} for <Request 'b'"):
        settle(core, in_flight, 41, token_id)
