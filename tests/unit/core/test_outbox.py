"""What waits for a slow client: merged, bounded by a count of bytes, and in the right order."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.core.core_parts import make_request
from trio_engine.core.outbox import ENTRY_BYTES, FINISHED_ID_BYTES, TOKEN_BYTES, Outbox
from trio_engine.outputs import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    LogprobsLists,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
    UtilityOutput,
)
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.request import Request

QUEUED = EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)
SCHEDULED = EngineCoreEvent(EngineCoreEventType.SCHEDULED, 2.0)
PREEMPTED = EngineCoreEvent(EngineCoreEventType.PREEMPTED, 3.0)


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(client_index=1, engine_index=3)


def append_tokens(outbox: Outbox, request: Request, *token_ids: int) -> None:
    for token_id in token_ids:
        outbox.append_token(request, token_id)


def take_outputs(outbox: Outbox) -> list[EngineCoreOutput]:
    (message,) = outbox.take(0.0)
    return message.outputs


def test_an_empty_outbox_has_no_message(outbox: Outbox) -> None:
    assert outbox.is_empty
    assert outbox.take(5.0) == []


def test_a_message_tells_its_engine_and_time(outbox: Outbox) -> None:
    append_tokens(outbox, make_request("a"), 7)
    outbox.put_utility_output(UtilityOutput(1, failure_message="no"))
    messages = outbox.take(5.0)
    assert [(message.engine_index, message.timestamp) for message in messages] == [(3, 5.0)] * 2


def test_tokens_of_a_request_are_merged_in_order(outbox: Outbox) -> None:
    first, second = make_request("a"), make_request("b")
    append_tokens(outbox, first, 1, 2)
    append_tokens(outbox, second, 8)
    append_tokens(outbox, first, 3)
    outputs = take_outputs(outbox)
    assert [(o.request_id, o.new_token_ids) for o in outputs] == [("a", [1, 2, 3]), ("b", [8])]


def test_what_is_taken_is_gone(outbox: Outbox) -> None:
    request = make_request("a")
    append_tokens(outbox, request, 1)
    outbox.put_scheduler_stats(SchedulerStats())
    outbox.put_utility_output(UtilityOutput(1, failure_message="no"))
    outbox.take(0.0)
    assert outbox.is_empty
    assert outbox.num_bytes == 0
    assert outbox.take(0.0) == []
    append_tokens(outbox, request, 2)
    (message,) = outbox.take(0.0)
    assert message.outputs[0].new_token_ids == [2]
    assert message.scheduler_stats is None
    assert message.finished_requests is None


def test_what_was_taken_does_not_change_any_more(outbox: Outbox) -> None:
    request = make_request("a")
    append_tokens(outbox, request, 1)
    outputs = take_outputs(outbox)
    append_tokens(outbox, request, 2)
    outbox.finish(request, FinishReason.LENGTH)
    assert outputs == [EngineCoreOutput("a", [1])]


def test_a_finish_joins_the_unsent_tokens(outbox: Outbox) -> None:
    request = make_request("a")
    append_tokens(outbox, request, 1)
    outbox.finish(request, FinishReason.STOP, 9)
    (message,) = outbox.take(0.0)
    assert message.outputs == [
        EngineCoreOutput("a", [1], finish_reason=FinishReason.STOP, stop_reason=9)
    ]
    assert message.finished_requests == {"a"}


def test_a_finish_after_all_tokens_were_sent_is_an_entry_without_tokens(outbox: Outbox) -> None:
    request = make_request("a")
    append_tokens(outbox, request, 1)
    outbox.take(0.0)
    outbox.finish(request, FinishReason.ABORT)
    assert take_outputs(outbox) == [EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT)]


def test_a_new_request_under_a_used_id_has_an_entry_of_its_own(outbox: Outbox) -> None:
    first, second = make_request("x"), make_request("x")
    append_tokens(outbox, first, 1)
    outbox.finish(first, FinishReason.LENGTH)
    append_tokens(outbox, second, 2)
    outputs = take_outputs(outbox)
    assert [(o.new_token_ids, o.finish_reason) for o in outputs] == [
        ([1], FinishReason.LENGTH),
        ([2], None),
    ]


def test_a_dropped_request_leaves_only_its_id_among_the_finished(outbox: Outbox) -> None:
    aborted, other = make_request("x"), make_request("y")
    append_tokens(outbox, aborted, 1, 2)
    append_tokens(outbox, other, 3)
    outbox.drop(aborted)
    (message,) = outbox.take(0.0)
    assert [output.request_id for output in message.outputs] == ["y"]
    assert message.finished_requests == {"x"}


def test_a_drop_of_what_has_no_entry_tells_its_end(outbox: Outbox) -> None:
    outbox.drop(make_request("x"))
    assert not outbox.is_empty
    (message,) = outbox.take(0.0)
    assert (message.outputs, message.finished_requests) == ([], {"x"})


def test_a_drop_does_not_touch_the_next_request_under_that_id(outbox: Outbox) -> None:
    first, second = make_request("x"), make_request("x")
    append_tokens(outbox, first, 1)
    outbox.drop(first)
    append_tokens(outbox, second, 2)
    assert [output.new_token_ids for output in take_outputs(outbox)] == [[2]]


def test_refused_requests_each_get_their_end(outbox: Outbox) -> None:
    outbox.refuse("x", FinishReason.ERROR)
    outbox.refuse("x", FinishReason.ABORT)
    (message,) = outbox.take(0.0)
    assert [(o.request_id, o.finish_reason) for o in message.outputs] == [
        ("x", FinishReason.ERROR),
        ("x", FinishReason.ABORT),
    ]
    assert message.finished_requests == {"x"}


def test_a_refused_pooling_request_gets_the_tensor_that_its_front_end_needs(
    outbox: Outbox,
) -> None:
    outbox.refuse("p", FinishReason.ERROR, is_pooling=True)
    outbox.refuse("g", FinishReason.ERROR)
    pooling, generating = take_outputs(outbox)
    assert pooling.pooling_output == TensorData("float32", (0,), b"")
    assert generating.pooling_output is None


def test_the_first_entry_takes_the_prefill_stats_and_no_later_one(outbox: Outbox) -> None:
    request = make_request("a")
    request.prefill_stats = PrefillStats(num_prompt_tokens=3, num_computed_tokens=3)
    append_tokens(outbox, request, 1)
    (first,) = take_outputs(outbox)
    append_tokens(outbox, request, 2)
    (second,) = take_outputs(outbox)
    assert first.prefill_stats == PrefillStats(num_prompt_tokens=3, num_computed_tokens=3)
    assert second.prefill_stats is None


def test_events_go_with_the_next_entry_once(outbox: Outbox) -> None:
    request = make_request("a")
    request.events = [QUEUED, SCHEDULED]
    append_tokens(outbox, request, 1)
    (first,) = take_outputs(outbox)
    append_tokens(outbox, request, 2)
    (second,) = take_outputs(outbox)
    assert first.events == [QUEUED, SCHEDULED]
    assert second.events is None


def test_events_of_merged_tokens_are_appended(outbox: Outbox) -> None:
    request = make_request("a")
    request.events = [QUEUED, SCHEDULED]
    append_tokens(outbox, request, 1)
    request.events = [PREEMPTED, SCHEDULED]
    append_tokens(outbox, request, 2)
    (output,) = take_outputs(outbox)
    assert output.events == [QUEUED, SCHEDULED, PREEMPTED, SCHEDULED]


def test_events_just_before_the_end_join_an_unsent_entry(outbox: Outbox) -> None:
    request = make_request("a")
    append_tokens(outbox, request, 1)
    request.events = [PREEMPTED]
    outbox.finish(request, FinishReason.ABORT)
    (output,) = take_outputs(outbox)
    assert output.events == [PREEMPTED]


def test_trace_headers_come_back_with_every_entry(outbox: Outbox) -> None:
    request = make_request("a", source_fields={"trace_headers": {"traceparent": "t"}})
    append_tokens(outbox, request, 1)
    (first,) = take_outputs(outbox)
    outbox.finish(request, FinishReason.LENGTH)
    (second,) = take_outputs(outbox)
    assert first.trace_headers == second.trace_headers == {"traceparent": "t"}


def test_gauges_are_the_latest_and_prefix_numbers_add_up(outbox: Outbox) -> None:
    outbox.put_scheduler_stats(
        SchedulerStats(
            num_running_reqs=5,
            num_waiting_reqs=1,
            kv_cache_usage=0.5,
            prefix_cache_stats=PrefixCacheStats(
                reset=True,
                requests=1,
                queries=10,
                hits=4,
                preempted_requests=1,
                preempted_queries=2,
                preempted_hits=3,
            ),
        )
    )
    outbox.put_scheduler_stats(
        SchedulerStats(
            num_running_reqs=2,
            kv_cache_usage=0.25,
            prefix_cache_stats=PrefixCacheStats(
                requests=2,
                queries=20,
                hits=8,
                preempted_requests=10,
                preempted_queries=20,
                preempted_hits=30,
            ),
        )
    )
    (message,) = outbox.take(0.0)
    assert message.scheduler_stats == SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=0,
        kv_cache_usage=0.25,
        prefix_cache_stats=PrefixCacheStats(
            reset=True,
            requests=3,
            queries=30,
            hits=12,
            preempted_requests=11,
            preempted_queries=22,
            preempted_hits=33,
        ),
    )


@pytest.mark.parametrize(
    ("earlier", "later", "merged"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, True)],
)
def test_a_cache_reset_is_told_whenever_it_was(
    outbox: Outbox, earlier: bool, later: bool, merged: bool
) -> None:
    for reset in (earlier, later):
        outbox.put_scheduler_stats(SchedulerStats(prefix_cache_stats=PrefixCacheStats(reset=reset)))
    (message,) = outbox.take(0.0)
    assert message.scheduler_stats is not None
    assert message.scheduler_stats.prefix_cache_stats.reset is merged


def test_stats_alone_are_a_message(outbox: Outbox) -> None:
    outbox.put_scheduler_stats(SchedulerStats())
    assert not outbox.is_empty
    (message,) = outbox.take(0.0)
    assert (message.outputs, message.scheduler_stats) == ([], SchedulerStats())


def test_each_utility_answer_has_a_message_alone_after_all_outputs(outbox: Outbox) -> None:
    first, second = (UtilityOutput(call_id, failure_message="no") for call_id in (7, 8))
    outbox.put_utility_output(first)
    outbox.put_utility_output(second)
    append_tokens(outbox, make_request("a"), 1)
    outputs, *answers = outbox.take(0.0)
    assert outputs.utility_output is None
    assert [answer.utility_output for answer in answers] == [first, second]
    for answer in answers:
        assert not answer.outputs
        assert answer.scheduler_stats is None
        assert answer.finished_requests is None


def test_an_utility_answer_alone_is_one_message(outbox: Outbox) -> None:
    outbox.put_utility_output(UtilityOutput(7, failure_message="no"))
    assert not outbox.is_empty
    assert len(outbox.take(0.0)) == 1


def test_the_engine_s_death_stays_to_be_told_after_everything_else(outbox: Outbox) -> None:
    assert not outbox.is_dead
    outbox.mark_dead()
    assert not outbox.is_empty
    assert outbox.take(0.0) == []
    assert outbox.is_dead


def test_unsent_bytes_grow_with_entries_and_tokens(outbox: Outbox) -> None:
    request = make_request("abcd")
    append_tokens(outbox, request, 1, 2)
    assert outbox.num_bytes == ENTRY_BYTES + 4 + 2 * TOKEN_BYTES
    outbox.refuse("xy", FinishReason.ERROR)
    refused = ENTRY_BYTES + 2 + FINISHED_ID_BYTES + 2
    assert outbox.num_bytes == ENTRY_BYTES + 4 + 2 * TOKEN_BYTES + refused
    outbox.finish(make_request("z"), FinishReason.ABORT)
    ended = ENTRY_BYTES + 1 + FINISHED_ID_BYTES + 1
    assert outbox.num_bytes == ENTRY_BYTES + 4 + 2 * TOKEN_BYTES + refused + ended


def test_a_drop_takes_exactly_its_bytes_back(outbox: Outbox) -> None:
    append_tokens(outbox, make_request("stays"), 1)
    before = outbox.num_bytes
    request = make_request("goes")
    append_tokens(outbox, request, 1, 2, 3)
    outbox.drop(request)
    before += FINISHED_ID_BYTES + 4  # that its end is told
    assert outbox.num_bytes == before
    outbox.drop(request)
    assert outbox.num_bytes == before


def test_the_texts_of_an_end_count_too(outbox: Outbox) -> None:
    outbox.finish(make_request("a"), FinishReason.ERROR, "reason")
    ended = ENTRY_BYTES + 1 + FINISHED_ID_BYTES + 1 + 6
    assert outbox.num_bytes == ended
    outbox.refuse("b", FinishReason.ERROR, "another")
    refused = ENTRY_BYTES + 1 + FINISHED_ID_BYTES + 1 + 7
    assert outbox.num_bytes == ended + refused


def test_trace_headers_count_while_they_are_unsent(outbox: Outbox) -> None:
    request = make_request("a", source_fields={"trace_headers": {"key": "value"}})
    append_tokens(outbox, request, 1)
    assert outbox.num_bytes == ENTRY_BYTES + 1 + TOKEN_BYTES + 8
    outbox.drop(request)
    assert outbox.num_bytes == FINISHED_ID_BYTES + 1


def test_what_is_unsent_of_an_ended_request_does_not_keep_its_prompt(outbox: Outbox) -> None:
    request = make_request("a")
    before = sys.getrefcount(request)
    append_tokens(outbox, request, 1)
    outbox.append_logprobs(request, logprobs_row(1))
    outbox.finish(request, FinishReason.LENGTH)
    after = sys.getrefcount(request)
    assert after == before


def logprobs_row(token_id: int) -> LogprobsLists:
    ids = np.full((1, 21), token_id, dtype=np.int32)
    return LogprobsLists(ids, ids.astype(np.float32), np.ones(1, dtype=np.int64))


def fill_with_tokens(outbox: Outbox, number: int) -> None:
    append_tokens(outbox, make_request(f"request-{number}"), *range(1000, 1500))


def fill_with_logprobs(outbox: Outbox, number: int) -> None:
    request = make_request(f"request-{number}")
    for token_id in range(1000, 1100):
        outbox.append_logprobs(request, logprobs_row(token_id))
        outbox.append_token(request, token_id)


def fill_with_ends(outbox: Outbox, number: int) -> None:
    request = make_request(f"request-{number}")
    request.events = [
        EngineCoreEvent(EngineCoreEventType(kind), number + kind / 10) for kind in (1, 2)
    ]
    request.prefill_stats = PrefillStats(num_prompt_tokens=number)
    append_tokens(outbox, request, 1000 + number)
    outbox.finish(request, FinishReason.LENGTH)


def fill_with_refusals(outbox: Outbox, number: int) -> None:
    outbox.refuse(f"request-{number}", FinishReason.ERROR, f"{number} requests wait already")


def fill_with_drops(outbox: Outbox, number: int) -> None:
    outbox.drop(make_request(f"request-{number}"))


def fill_with_answers(outbox: Outbox, number: int) -> None:
    outbox.put_utility_output(UtilityOutput(1000 + number, failure_message=f"no {number}"))


@pytest.mark.parametrize(
    "fill",
    [
        fill_with_tokens,
        fill_with_logprobs,
        fill_with_ends,
        fill_with_refusals,
        fill_with_drops,
        fill_with_answers,
    ],
)
def test_what_counts_towards_the_limit_is_about_what_it_takes_in_memory(
    outbox: Outbox, fill: Callable[[Outbox, int], None]
) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(200):
            fill(outbox, number)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.2 < (after - before) / outbox.num_bytes < 1.4


def test_everything_unsent_counts_towards_the_limit() -> None:
    outbox = Outbox(0, 0, limit_bytes=3000)
    sizes = [outbox.num_bytes]
    puts: list[Callable[[], None]] = [
        lambda: outbox.refuse("refused", FinishReason.ERROR),
        lambda: outbox.put_utility_output(UtilityOutput(1, failure_message="no")),
        lambda: outbox.put_utility_output(UtilityOutput(2), result_bytes=300),
        lambda: outbox.drop(make_request("dropped")),
    ]
    for put in puts:
        put()
        sizes.append(outbox.num_bytes)
    assert sizes == sorted(set(sizes))
    assert not outbox.is_full
    outbox.put_utility_output(UtilityOutput(3), result_bytes=3000)
    assert outbox.is_full
    outbox.take(0.0)
    assert outbox.num_bytes == 0
    assert not outbox.is_full


def test_tokens_of_many_requests_weigh_as_those_of_each_alone() -> None:
    requests = [make_request(name * 3) for name in "ab"]
    together, one_by_one = Outbox(0, 0), Outbox(0, 0)
    for token_ids in ([7, 8], [9, 10]):  # the second ones find entries
        together.append_tokens(requests, token_ids)
        for request, token_id in zip(requests, token_ids, strict=True):
            one_by_one.append_token(request, token_id)
        assert together.num_bytes == one_by_one.num_bytes > 0
    assert take_outputs(together) == take_outputs(one_by_one)
