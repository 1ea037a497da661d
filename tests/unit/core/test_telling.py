"""What outputs tell beside tokens: events, prefill stats, scheduler stats, counts."""

from __future__ import annotations

from tests.unit.core.core_parts import (
    event_types,
    make_core,
    make_source,
    plan_step,
    run_step,
    settle,
    take,
    take_messages,
)
from trio_engine.outputs import (
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def ends(outputs: list[EngineCoreOutput]) -> dict[str, FinishReason | None]:
    return {output.request_id: output.finish_reason for output in outputs}


# Events, prefill stats, scheduler stats


def test_the_first_entry_tells_events_and_prefill_stats_and_later_ones_neither() -> None:
    core = make_core()
    core.add(make_source("a", 5))
    run_step(core, 7)
    (first,) = take(core)
    run_step(core, 8)
    (second,) = take(core)
    assert event_types(first) == [QUEUED, SCHEDULED]
    assert first.events is not None
    assert first.events[0].timestamp < first.events[1].timestamp
    assert first.prefill_stats == PrefillStats(num_prompt_tokens=5, num_computed_tokens=5)
    assert (second.events, second.prefill_stats) == (None, None)


def test_a_chunk_of_a_prompt_has_no_entry() -> None:
    core = make_core(max_num_batched_tokens=2)
    core.add(make_source("a", 4))
    run_step(core, -1)
    assert take(core) == []
    run_step(core, 7)
    (first,) = take(core)
    assert event_types(first) == [QUEUED, SCHEDULED]


def test_each_resumption_adds_its_events_and_no_second_prefill_stats() -> None:
    core = make_core(num_blocks=6)
    core.add(make_source("a", 3, max_tokens=2))
    core.add(make_source("b", 2, max_tokens=3))
    run_step(core, 7, 8)
    take(core)
    run_step(core, 7)
    take(core)
    run_step(core, 9)
    (resumed,) = take(core)
    assert resumed.request_id == "b"
    assert event_types(resumed) == [PREEMPTED, SCHEDULED]
    assert resumed.prefill_stats is None


def test_a_request_preempted_before_its_first_token_tells_the_first_prefill_only() -> None:
    core = make_core(num_blocks=10, max_num_batched_tokens=4, enable_prefix_caching=False)
    core.add(make_source("a", 2, max_tokens=3))
    core.add(make_source("b", 7))
    run_step(core, 7, -1)
    run_step(core, 8, -1)
    plan = run_step(core, 9)
    assert plan.finished_slots
    assert core.statistics().num_preemptions == 1
    take(core)
    run_step(core, -1)
    run_step(core, 10)
    (first,) = take(core)
    assert event_types(first) == [QUEUED, SCHEDULED, PREEMPTED, SCHEDULED]
    assert first.prefill_stats == PrefillStats(num_prompt_tokens=7, num_computed_tokens=7)


def test_an_end_tells_the_events_that_no_token_took_along() -> None:
    core = make_core(num_blocks=6)
    core.add(make_source("a", 3))
    core.add(make_source("b", 2))
    run_step(core, 7, 8)
    run_step(core, 7)
    core.abort_all()
    b = take(core)[1]
    assert event_types(b) == [QUEUED, SCHEDULED, PREEMPTED]


def test_stats_go_to_the_first_client_with_an_output_else_to_client_0() -> None:
    core = make_core(num_clients=3)
    core.add(make_source("c", client_index=2))
    core.add(make_source("b", client_index=1))
    run_step(core, 7, 7)
    messages = [take_messages(core, client_index) for client_index in range(3)]
    assert messages[0] == []
    assert messages[1][0].scheduler_stats is not None
    assert messages[2][0].scheduler_stats is None
    plan = plan_step(core)
    core.abort(1, ["b"])
    core.abort(2, ["c"])
    settle(core, plan, 8, 8)
    assert take_messages(core, 0)[0].scheduler_stats is not None


def test_stats_are_the_state_after_the_step() -> None:
    core = make_core(num_blocks=40, max_num_seqs=2, enable_prefix_caching=False)
    for name in "abc":
        core.add(make_source(name, 5, max_tokens=2))
    run_step(core, 7, 7)
    (message,) = take_messages(core)
    assert message.scheduler_stats == SchedulerStats(
        num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.25
    )
    run_step(core, 7, 7)
    (message,) = take_messages(core)
    assert message.scheduler_stats == SchedulerStats(num_waiting_reqs=1)


def test_an_end_without_a_step_makes_stats_stale_until_they_are_flushed() -> None:
    core = make_core()
    core.add(make_source("a"))
    run_step(core, 7)
    take_messages(core)
    core.flush_stats()
    assert core.outboxes[0].is_empty
    core.abort(0, ["a"])
    take_messages(core)
    core.flush_stats()
    core.flush_stats()
    (message,) = take_messages(core)
    assert message.scheduler_stats == SchedulerStats()
    core.flush_stats()
    assert core.outboxes[0].is_empty


def test_without_log_stats_there_are_tokens_and_nothing_else() -> None:
    core = make_core(log_stats=False)
    core.add(make_source("a"))
    run_step(core, 7)
    (message,) = take_messages(core)
    assert message.outputs == [EngineCoreOutput("a", [7])]
    assert message.scheduler_stats is None
    core.abort(0, ["a"])
    take_messages(core)
    core.flush_stats()
    assert core.outboxes[0].is_empty


def test_messages_carry_the_engine_s_index() -> None:
    core = make_core(engine_index=3)
    core.refuse(0, "x")
    assert take_messages(core)[0].engine_index == 3


def test_statistics_count_what_is_there() -> None:
    core = make_core(num_blocks=10, max_num_seqs=1)
    core.add(make_source("a", 4))
    core.add(make_source("b", 4))
    plan = plan_step(core)
    assert core.running_request_ids == ["a"]
    statistics = core.statistics()
    assert statistics.num_running_requests == 1
    assert statistics.num_waiting_requests == 1
    assert (statistics.num_free_blocks, statistics.num_blocks) == (6, 10)
    assert statistics.num_plans_in_flight == core.num_plans_in_flight == 1
    assert (statistics.num_steps, statistics.num_preemptions) == (1, 0)
    assert (statistics.is_paused, statistics.is_draining) == (False, False)
    settle(core, plan, 7)
    assert core.running_request_ids == ["a"]
    core.abort_all()
    assert core.running_request_ids == []
