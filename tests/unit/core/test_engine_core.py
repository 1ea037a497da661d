"""Requests come in, end, and are told to their clients; nobody is held up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.core.core_parts import (
    add,
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
from trio_engine.core.outbox import ENTRY_BYTES, TOKEN_BYTES
from trio_engine.core.plan import StepResult
from trio_engine.errors import StepError
from trio_engine.outputs import (
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from trio_engine.requests import PauseMode
from trio_engine.tensors import TensorData

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def ends(outputs: list[EngineCoreOutput]) -> dict[str, FinishReason | None]:
    return {output.request_id: output.finish_reason for output in outputs}


# Coming in


def test_a_request_is_queued_runs_and_ends_with_its_last_token() -> None:
    core = make_core()
    core.add(make_source("a", max_tokens=2))
    assert core.has_requests
    assert not core.has_running_requests
    run_step(core, 7)
    assert core.has_running_requests
    run_step(core, 8)
    (output,) = take(core)
    assert (output.request_id, output.new_token_ids) == ("a", [7, 8])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)
    assert not core.has_requests
    assert core.schedule() is None


@pytest.mark.parametrize("client_index", [-1, 1])
def test_a_request_of_no_client_is_dropped_with_a_log_line(
    client_index: int, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(num_clients=1)
    core.add(make_source("a", client_index=client_index))
    core.refuse(client_index, "a")
    core.abort(client_index, ["a"])
    assert not core.has_requests
    assert core.outboxes[0].is_empty
    assert "add_dropped request_id='a'" in caplog.text


def test_a_request_under_a_live_id_is_dropped_and_the_first_one_s_stream_is_pure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = make_core()
    core.add(make_source("x", [1], max_tokens=2))
    core.add(make_source("x", [2, 3], max_tokens=1))
    core.add(make_source("x", []))
    assert caplog.text.count("reason='id is live'") == 2
    run_step(core, 7)
    run_step(core, 8)
    (output,) = take(core)
    assert (output.new_token_ids, output.finish_reason) == ([7, 8], FinishReason.LENGTH)


def test_an_id_may_be_used_again_after_its_end() -> None:
    core = make_core()
    for token_id in (7, 8):
        core.add(make_source("x", max_tokens=1))
        run_step(core, token_id)
    assert [output.new_token_ids for output in take(core)] == [[7], [8]]


def test_two_clients_may_use_one_id_at_once() -> None:
    core = make_core(num_clients=2)
    core.add(make_source("x", [1], client_index=0, max_tokens=2))
    core.add(make_source("x", [2], client_index=1, max_tokens=2))
    run_step(core, 7, 8)
    assert [output.new_token_ids for output in take(core, 0)] == [[7]]
    assert [output.new_token_ids for output in take(core, 1)] == [[8]]


def test_what_can_never_be_served_ends_with_error_and_holds_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = make_core()
    core.add(make_source("bad", [-1]))
    core.add(make_source("good", max_tokens=1))
    (message,) = take_messages(core)
    (output,) = message.outputs
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
    assert output.stop_reason == "prompt_token_ids holds -1: ids run from 0 to 511"
    assert message.finished_requests == {"bad"}
    assert "add_refused request_id='bad' reason=prompt_token_ids holds -1" in caplog.text
    assert core.statistics().num_waiting_requests == 1
    run_step(core, 7)
    assert ends(take(core)) == {"good": FinishReason.LENGTH}


def test_a_pooling_request_is_refused_with_the_tensor_that_its_front_end_needs() -> None:
    core = make_core()
    core.add(make_source("p", source_fields={"pooling_params": []}))
    (output,) = take(core)
    assert output.finish_reason is FinishReason.ERROR
    assert output.pooling_output == TensorData("float32", (0,), b"")


def test_a_request_of_which_only_the_id_could_be_read_ends_with_error() -> None:
    core = make_core(num_clients=2)
    core.refuse(1, "x")
    core.refuse(1, "p", is_pooling=True)
    plain, pooling = take(core, 1)
    assert ends([plain, pooling]) == {"x": FinishReason.ERROR, "p": FinishReason.ERROR}
    assert (plain.pooling_output is None, pooling.pooling_output is None) == (True, False)
    assert core.outboxes[0].is_empty


def test_an_unreadable_request_under_a_live_id_does_not_end_that() -> None:
    core = make_core()
    core.add(make_source("x"))
    core.refuse(0, "x")
    assert core.outboxes[0].is_empty
    assert core.has_requests


def test_abort_immediately_is_admitted_and_ended_without_an_output() -> None:
    core = make_core()
    core.add(make_source("x", source_fields={"abort_immediately": True}))
    assert not core.has_requests
    (message,) = take_messages(core)
    assert (message.outputs, message.finished_requests) == ([], {"x"})


def test_abort_immediately_does_not_save_a_bad_request_from_its_error() -> None:
    core = make_core()
    core.add(make_source("x", [], source_fields={"abort_immediately": True}))
    assert ends(take(core)) == {"x": FinishReason.ERROR}


def test_beyond_max_waiting_requests_a_request_ends_with_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = make_core(max_waiting_requests=2, max_num_seqs=1)
    for name in "abcd":
        core.add(make_source(name))
    assert ends(take(core)) == {"d": FinishReason.ERROR}
    assert "add_refused request_id='d' reason=2 requests wait for a slot already" in caplog.text
    run_step(core, 7)
    core.add(make_source("e"))
    assert ends(take(core)) == {"a": None, "e": FinishReason.ERROR}
    core.abort(0, ["b"])
    core.add(make_source("f"))
    assert core.statistics().num_waiting_requests == 2


@pytest.mark.parametrize("paused", [False, True])
def test_a_burst_of_as_many_as_there_are_slots_waits_for_nothing(paused: bool) -> None:
    core = make_core(max_waiting_requests=0, max_num_seqs=3)
    if paused:
        core.pause(PauseMode.KEEP)
    for name in "abcd":
        core.add(make_source(name))
    assert ends(take(core)) == {"d": FinishReason.ERROR}
    core.resume()
    run_step(core, 7, 7, 7)
    core.add(make_source("e"))
    assert ends(take(core))["e"] is FinishReason.ERROR
    core.abort(0, ["a"])
    core.add(make_source("f"))
    assert ends(take(core)) == {}


def test_nil_max_tokens_generates_up_to_max_model_len() -> None:
    driver = make_driver(max_model_len=10)
    log = add(driver, make_source("a", 3, max_tokens=None))
    driver.run_until_idle()
    assert (len(log.token_ids), log.finish_reason) == (7, FinishReason.LENGTH)


# More than the pool holds


@pytest.mark.known_fault(kind="request-that-never-fits")
def test_a_prompt_that_the_pool_cannot_hold_ends_at_once_and_holds_up_nobody() -> None:
    driver = make_driver(num_blocks=8, block_size=4)
    too_long = add(driver, make_source("a", 40))
    behind = add(driver, make_source("b", 4, max_tokens=3))
    driver.run_until_idle()
    assert too_long.finish_reason is FinishReason.ERROR
    assert (len(behind.token_ids), behind.finish_reason) == (3, FinishReason.LENGTH)


@pytest.mark.known_fault(kind="request-that-never-fits")
def test_a_request_that_outgrows_the_pool_alone_ends_with_length_and_is_never_preempted() -> None:
    driver = make_driver(num_blocks=8, block_size=4)
    source = make_source("a", 20, max_tokens=40)
    log = add(driver, source)
    driver.run_until_idle()
    # 32 tokens in blocks and a last one whose KV is never computed.
    assert (len(log.token_ids), log.finish_reason) == (13, FinishReason.LENGTH)
    assert log.token_ids == solo_tokens(source)[:13]
    assert driver.core.statistics().num_preemptions == 0


@pytest.mark.known_fault(kind="request-that-never-fits")
def test_the_longest_prompt_that_the_pool_holds_gets_its_token() -> None:
    driver = make_driver(num_blocks=8, block_size=4)
    log = add(driver, make_source("a", 32, max_tokens=40))
    driver.run_until_idle()
    assert (len(log.token_ids), log.finish_reason) == (1, FinishReason.LENGTH)


# Aborts


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
def test_an_abort_frees_all_blocks_and_is_answered_by_the_finished_id_alone(state: str) -> None:
    core = make_core(num_blocks=6, max_num_batched_tokens=4, max_num_seqs=2)
    if state == "preempted":
        core.add(make_source("older", 2))
        core.add(make_source("x", 2))
        run_step(core, 7, 8)
        run_step(core, 7, 8)
        run_step(core, 7)
        assert core.statistics().num_preemptions == 1
        core.abort(0, ["older"])
    else:
        core.add(make_source("x", 5))
        if state != "waiting":
            run_step(core, -1)
        if state == "decode":
            run_step(core, 7)
    core.abort(0, ["x"])
    core.check_integrity()
    assert not core.has_requests
    statistics = core.statistics()
    assert statistics.num_free_blocks == statistics.num_blocks
    (message,) = take_messages(core)
    assert message.outputs == []
    assert message.finished_requests is not None
    assert "x" in message.finished_requests
    assert core.schedule() is None


def test_an_abort_of_an_unknown_or_finished_id_means_nothing() -> None:
    core = make_core()
    core.add(make_source("x", max_tokens=1))
    run_step(core, 7)
    take(core)
    core.abort(0, ["x", "never"])
    assert core.outboxes[0].is_empty


def test_an_abort_takes_back_what_is_unsent_and_only_of_its_request() -> None:
    core = make_core()
    core.add(make_source("x"))
    core.add(make_source("y"))
    run_step(core, 7, 8)
    core.abort(0, ["x"])
    (message,) = take_messages(core)
    assert [output.request_id for output in message.outputs] == ["y"]
    assert message.finished_requests == {"x"}


def test_an_abort_from_another_client_is_not_honoured() -> None:
    core = make_core(num_clients=2)
    core.add(make_source("x", client_index=0, max_tokens=1))
    core.abort(1, ["x"])
    assert core.outboxes[1].is_empty
    run_step(core, 7)
    assert ends(take(core, 0)) == {"x": FinishReason.LENGTH}


def test_an_abort_names_many_ids_at_once() -> None:
    core = make_core()
    for name in "abc":
        core.add(make_source(name))
    core.abort(0, ["a", "a", "c"])
    assert [row.request_id for row in plan_step(core).new_rows] == ["b"]


@pytest.mark.known_fault(kind="late-abort")
def test_add_abort_add_under_one_id_in_one_burst_serves_the_second() -> None:
    core = make_core()
    core.add(make_source("x", [1], max_tokens=1))
    core.abort(0, ["x"])
    core.add(make_source("x", [2], max_tokens=1))
    plan = plan_step(core)
    assert [row.token_ids for row in plan.new_rows] == [[2]]
    settle(core, plan, 7)
    (message,) = take_messages(core)
    assert [output.new_token_ids for output in message.outputs] == [[7]]
    assert ends(message.outputs) == {"x": FinishReason.LENGTH}


def test_abort_all_gives_each_request_its_end_at_its_own_client() -> None:
    core = make_core(num_clients=2, max_num_seqs=1)
    core.add(make_source("runs", client_index=0))
    core.add(make_source("waits", client_index=1))
    run_step(core, 7)
    core.abort_all()
    core.check_integrity()
    (running,) = take_messages(core, 0)
    (waiting,) = take_messages(core, 1)
    assert running.outputs[0].new_token_ids == [7]
    assert ends(running.outputs) == {"runs": FinishReason.ABORT}
    assert waiting.outputs[0].new_token_ids == []
    assert ends(waiting.outputs) == {"waits": FinishReason.ABORT}
    assert (running.finished_requests, waiting.finished_requests) == ({"runs"}, {"waits"})
    assert not core.has_requests


# A client that does not read


def test_a_client_that_does_not_read_loses_its_requests_and_delays_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    six_tokens = ENTRY_BYTES + len("slow") + 6 * TOKEN_BYTES
    core = make_core(num_clients=2, outbox_limit_bytes=six_tokens, max_num_seqs=2)
    core.add(make_source("slow", client_index=0, max_tokens=50))
    core.add(make_source("fine", client_index=1, max_tokens=50))
    core.add(make_source("slow and waiting", client_index=0))
    for _ in range(6):
        run_step(core, 7, 8)
        take(core, 1)
        assert core.has_requests
    assert core.outboxes[0].num_bytes == six_tokens
    run_step(core, 7, 8)
    core.check_integrity()
    unsent_bytes = six_tokens + TOKEN_BYTES
    assert f"client_overflow client=0 unsent_bytes={unsent_bytes} requests=2" in caplog.text
    (unread,) = take_messages(core, 0)
    assert unread.outputs[0].new_token_ids == [7] * 7
    assert ends(unread.outputs) == {
        "slow": FinishReason.ERROR,
        "slow and waiting": FinishReason.ERROR,
    }
    assert unread.finished_requests == {"slow", "slow and waiting"}
    assert take(core, 1)[0].finish_reason is None
    run_step(core, 8)


def test_a_client_over_its_limit_is_refused_until_it_reads() -> None:
    core = make_core(outbox_limit_bytes=1)
    core.add(make_source("a", max_tokens=1))
    run_step(core, 7)
    core.add(make_source("b"))
    assert ends(take(core)) == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR}
    core.add(make_source("c"))
    assert core.has_requests


def test_an_overflow_without_live_requests_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(num_clients=2, outbox_limit_bytes=1)
    core.refuse(0, "x")
    core.add(make_source("a", client_index=1, max_tokens=1))
    run_step(core, 7)
    assert "client_overflow" not in caplog.text
    assert ends(take(core, 1)) == {"a": FinishReason.LENGTH}


# An executor that is broken


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"plan_id": 1, "token_ids": [7]}, "result of plan 1 out of turn"),
        ({"plan_id": 0, "token_ids": []}, "plan 0 has 1 rows, its result 0"),
        ({"plan_id": 0, "token_ids": [7, 8]}, "plan 0 has 1 rows, its result 2"),
        ({"plan_id": 0, "token_ids": [512]}, "plan 0 gave token 512"),
        ({"plan_id": 0, "token_ids": [-1]}, "plan 0 gave token -1"),
    ],
)
def test_a_result_that_does_not_fit_its_plan_ends_the_engine(
    result: dict[str, Any], message: str
) -> None:
    core = make_core()
    core.add(make_source("a"))
    plan_step(core)
    with pytest.raises(StepError, match=message):
        core.update(StepResult(**result))
    assert take(core) == []


def test_a_result_without_a_plan_ends_the_engine() -> None:
    with pytest.raises(StepError, match="out of turn"):
        make_core().update(StepResult(plan_id=0, token_ids=[]))


# The integrity check


def test_the_integrity_check_finds_tables_that_differ() -> None:
    core = make_core()
    core.add(make_source("a"))
    (request,) = core._requests.values()
    del core._requests[request.key]
    with pytest.raises(AssertionError, match="table and queues differ"):
        core.check_integrity()
    core._requests[(0, "b")] = request
    with pytest.raises(AssertionError, match="stands under"):
        core.check_integrity()
