"""Requests with a grammar: they wait for it without holding others up, and end with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.core.core_parts import (
    VOCAB_SIZE,
    add,
    make_core,
    make_driver,
    make_source,
    plan_step,
    settle,
    take,
    take_messages,
)
from trio_engine.core.plan import StepResult
from trio_engine.outputs import EngineCoreEventType, FinishReason
from trio_engine.requests import EngineCoreRequest, PauseMode
from trio_engine.sampling_params import StructuredOutputsParams
from trio_engine.testing.hashed_grammar import HashedGrammar

if TYPE_CHECKING:
    from trio_engine.core.engine_core import EngineCore
    from trio_engine.core.plan import RowGrammar
    from trio_engine.core.request import Request
    from trio_engine.testing.core_driver import CoreDriver

EOS = 3
GRAMMAR = HashedGrammar(VOCAB_SIZE, num_tokens=4)


def ask(request_id: str = "r", prompt: int = 3, **options: Any) -> EngineCoreRequest:
    params = StructuredOutputsParams(regex=options.pop("regex", "4"))
    options.setdefault("max_tokens", 20)
    return make_source(request_id, prompt, structured_outputs=params, **options)


def compile_hashed(params: StructuredOutputsParams) -> RowGrammar | str:
    """The regex is the number of tokens, and after a dash where it fails."""
    assert params.regex is not None
    if params.regex == "no":
        return "it is no grammar"
    num_tokens, dash, fails_after = params.regex.partition("-")
    return HashedGrammar(
        VOCAB_SIZE, int(num_tokens), fails_after=int(fails_after) if dash else None
    )


def make_structured_driver(**options: Any) -> CoreDriver:
    return make_driver(compile_grammar=compile_hashed, **options)


def pending(core: EngineCore) -> Request:
    (request,) = core.pending_grammars
    return request


# Waiting


def test_a_request_without_its_grammar_waits_and_holds_nobody_up() -> None:
    core = make_core()
    core.add(ask("structured"))
    core.add(make_source("free"))
    plan = plan_step(core)
    assert [row.request_id for row in plan.new_rows] == ["free"]
    settle(core, plan, 100)
    (message,) = take_messages(core)
    stats = message.scheduler_stats
    assert stats is not None
    counts = (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs)
    assert counts == (1, 0, 1)
    assert core.statistics().num_waiting_requests == 1


def test_with_its_grammar_it_runs_in_the_turn_of_its_coming() -> None:
    core = make_core(max_num_seqs=1)
    core.add(ask("structured"))
    core.add(make_source("free"))
    core.put_grammar(pending(core), GRAMMAR)
    plan = plan_step(core)
    assert [row.request_id for row in plan.new_rows] == ["structured"]
    assert plan.new_rows[0].grammar is GRAMMAR


def test_until_it_has_its_grammar_the_device_has_nothing_to_do() -> None:
    core = make_core()
    core.add(ask())
    assert core.has_requests
    assert not core.has_runnable_requests
    core.put_grammar(pending(core), GRAMMAR)
    assert core.has_runnable_requests
    core.pause(PauseMode.KEEP)
    assert not core.has_runnable_requests


def test_a_request_without_a_grammar_has_none_in_its_row() -> None:
    core = make_core()
    core.add(make_source())
    assert plan_step(core).new_rows[0].grammar is None


def test_news_are_told_once() -> None:
    core = make_core()
    core.add(ask("one"))
    core.add(ask("two"))
    new, ended = core.pending_grammars.take_news()
    assert [request.request_id for request in new] == ["one", "two"]
    assert ended == []
    assert core.pending_grammars.take_news() == ([], [])
    core.abort(0, ["two"])
    assert core.pending_grammars.take_news() == ([], [new[1]])


def test_events_tell_when_it_came_and_when_it_started() -> None:
    core = make_core()
    core.add(ask())
    core.put_grammar(pending(core), GRAMMAR)
    settle(core, plan_step(core), 100)
    (output,) = take(core)
    assert output.events is not None
    types = [event.type for event in output.events]
    assert types == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]


# Ends before it runs


def test_a_grammar_that_failed_ends_its_request_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = make_core()
    core.add(ask("bad"))
    core.add(make_source("free"))
    core.put_grammar(pending(core), "it is no grammar")
    (output,) = take(core)
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
    assert output.stop_reason == "structured_outputs.regex: it is no grammar"
    (record,) = caplog.records
    assert (record.levelname, record.getMessage().split()[0]) == ("WARNING", "grammar_failed")
    assert [row.request_id for row in plan_step(core).new_rows] == ["free"]


def test_an_abort_while_it_waits_ends_it_and_what_comes_late_means_nothing() -> None:
    core = make_core()
    core.add(ask())
    request = pending(core)
    core.abort(0, ["r"])
    (message,) = take_messages(core)
    assert message.outputs == []
    assert message.finished_requests == {"r"}
    core.add(ask())  # under the same id
    core.put_grammar(request, GRAMMAR)
    core.put_grammar(request, "too late to fail")
    assert pending(core) is not request
    assert take(core) == []
    core.check_integrity()


@pytest.mark.parametrize("by_pause", [False, True])
def test_abort_all_and_a_pause_that_aborts_end_it(by_pause: bool) -> None:
    core = make_core()
    core.add(ask())
    if by_pause:
        core.pause(PauseMode.ABORT)
    else:
        core.abort_all()
    (output,) = take(core)
    assert output.finish_reason is FinishReason.ABORT
    assert not core.has_requests
    core.check_integrity()


def test_a_pause_that_waits_does_not_wait_for_it() -> None:
    core = make_core()
    core.add(ask())
    core.pause(PauseMode.WAIT)
    assert core.is_quiescent
    core.put_grammar(pending(core), GRAMMAR)
    assert core.schedule() is None
    core.resume()
    assert core.schedule() is not None


def test_a_drain_lets_it_finish() -> None:
    driver = make_structured_driver()
    log = add(driver, ask(eos_token_id=EOS))
    driver.core.start_draining()
    assert driver.core.has_requests
    driver.run_until_idle()
    assert log.finish_reason is FinishReason.STOP
    assert not driver.core.has_requests


def test_it_counts_as_waiting_where_only_so_many_may_wait() -> None:
    core = make_core(max_num_seqs=1, max_waiting_requests=1)
    for request_id in ("one", "two", "three"):
        core.add(ask(request_id))
    (output,) = take(core)
    assert (output.request_id, output.finish_reason) == ("three", FinishReason.ERROR)


def test_a_client_that_does_not_read_loses_it() -> None:
    core = make_core(outbox_limit_bytes=1)
    core.add(make_source("free"))
    core.add(ask("structured"))
    settle(core, plan_step(core), 100)
    ends = {output.request_id: output.finish_reason for output in take(core)}
    assert ends == {"free": FinishReason.ERROR, "structured": FinishReason.ERROR}


# Ends by the grammar


def test_an_end_token_ends_it_as_any_request() -> None:
    driver = make_structured_driver()
    log = add(driver, ask(eos_token_id=EOS))
    driver.run_until_idle()
    assert (log.finish_reason, log.outputs[-1].stop_reason) == (FinishReason.STOP, None)
    assert log.token_ids[-1] == EOS
    assert len(log.token_ids) == 5
    GRAMMAR.check(log.token_ids, [EOS])


def test_a_stop_token_can_end_it() -> None:
    driver = make_structured_driver()
    log = add(driver, ask(stop_token_ids=[7]))
    driver.run_until_idle()
    assert (log.finish_reason, log.outputs[-1].stop_reason) == (FinishReason.STOP, 7)


@pytest.mark.parametrize("max_tokens", [4, 20])
def test_without_an_end_token_it_stops_with_the_last_token_of_the_grammar(max_tokens: int) -> None:
    """At the last place too, as a stop token would."""
    driver = make_structured_driver()
    log = add(driver, ask(max_tokens=max_tokens))
    driver.run_until_idle()
    assert (log.finish_reason, log.outputs[-1].stop_reason) == (FinishReason.STOP, None)
    assert len(log.token_ids) == 4
    GRAMMAR.check(log.token_ids, [])


def test_a_length_limit_ends_it_before_its_grammar() -> None:
    driver = make_structured_driver()
    log = add(driver, ask(max_tokens=3))
    driver.run_until_idle()
    assert (log.finish_reason, len(log.token_ids)) == (FinishReason.LENGTH, 3)


def test_the_end_of_the_grammar_goes_before_min_tokens() -> None:
    driver = make_structured_driver()
    log = add(driver, ask(min_tokens=10, eos_token_id=EOS))
    driver.run_until_idle()
    assert (log.finish_reason, len(log.token_ids)) == (FinishReason.STOP, 5)


def test_a_row_that_cannot_go_on_ends_with_error_and_others_do_not_notice() -> None:
    driver = make_structured_driver()
    bad = add(driver, ask("bad", regex="9-2", eos_token_id=EOS))
    good = add(driver, ask("good", 4, eos_token_id=EOS))
    free = add(driver, make_source("free", 5, max_tokens=6))
    driver.run_until_idle()
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.outputs[-1].stop_reason == "structured_outputs.regex: nothing may follow"
    assert len(bad.token_ids) == 2
    assert good.finish_reason is FinishReason.STOP
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 6)
    assert driver.core.statistics().num_preemptions == 0


def test_a_failure_told_of_a_row_that_has_ended_means_nothing() -> None:
    core = make_core()
    core.add(ask())
    core.put_grammar(pending(core), GRAMMAR)
    plan = plan_step(core)
    core.abort(0, ["r"])
    take_messages(core)
    (slot,) = plan.slots
    core.update(
        StepResult(plan_id=plan.plan_id, token_ids=[100], grammar_ends={slot: "nothing may follow"})
    )
    assert take(core) == []


# In the pipeline


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_structured_rows_are_in_every_plan(launches_ahead: bool) -> None:
    """A row that sat out every second plan would need twice as many."""
    driver = make_structured_driver(launches_ahead=launches_ahead)
    log = add(driver, ask(regex="40", max_tokens=30, eos_token_id=EOS))
    driver.run_until_idle()
    assert len(log.token_ids) == 30
    assert driver.core.statistics().num_steps == 30


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_rows_that_are_preempted_follow_their_grammar_all_the_same(launches_ahead: bool) -> None:
    solo = make_structured_driver(pipeline_depth=1)
    tight = make_structured_driver(launches_ahead=launches_ahead, max_model_len=30, num_blocks=32)
    logs = []
    for driver in (solo, tight):
        for index in range(3):
            source = ask(f"r{index}", 3 + index, regex="18", max_tokens=24, eos_token_id=EOS)
            logs.append(add(driver, source))
            if driver is solo:
                driver.run_until_idle()
    tight.run_until_idle()
    assert tight.core.statistics().num_preemptions
    for alone, among in zip(logs[:3], logs[3:], strict=True):
        assert among.token_ids == alone.token_ids
        assert among.finish_reason is FinishReason.STOP
        HashedGrammar(VOCAB_SIZE, 18).check(among.token_ids, [EOS])
