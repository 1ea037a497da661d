"""What a stream gives to its reader, and how it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.wire_pair import TEST_TIMEOUT_S, fence, make_letter_tokenizer, open_pair
from trio_engine.errors import (
    EngineClosedError,
    OverloadedError,
    RequestError,
    RequestFailedError,
)
from trio_engine.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogprobsLists,
    PrefillStats,
    PrefixCacheStats,
    SchedulerStats,
)
from trio_engine.requests import LoRARequest
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=100)
CUMULATIVE = SamplingParams(output_kind=RequestOutputKind.CUMULATIVE, max_tokens=100)
FINAL_ONLY = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=100)


async def test_delta_gives_what_is_new_and_ends_after_the_finish_reason() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1, 2, 3], DELTA) as stream:
            request = await wire.receive_add()
            await wire.send_tokens(request.request_id, [7, 8])
            first = await anext(stream)
            assert (first.token_ids, first.finish_reason) == ([7, 8], None)
            await wire.send_tokens(request.request_id, [9], FinishReason.STOP, stop_reason=9)
            last = await anext(stream)
            assert (last.token_ids, last.finish_reason) == ([9], FinishReason.STOP)
            assert (last.stop_reason, last.num_output_tokens) == (9, 3)
            assert (last.num_prompt_tokens, last.finished) == (3, True)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_cumulative_gives_everything_so_far() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], CUMULATIVE) as stream:
            request = await wire.receive_add()
            await wire.send_tokens(request.request_id, [7])
            assert (await anext(stream)).token_ids == [7]
            await wire.send_tokens(request.request_id, [8], FinishReason.LENGTH)
            assert (await anext(stream)).token_ids == [7, 8]


async def test_final_only_gives_one_item() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], FINAL_ONLY) as stream:
            request = await wire.receive_add()
            await wire.send_tokens(request.request_id, [7])
            await wire.send_tokens(request.request_id, [8], FinishReason.LENGTH)
            outputs = [output async for output in stream]
    assert [output.token_ids for output in outputs] == [[7, 8]]


async def test_a_slow_reader_gets_one_item_of_all_that_came() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], DELTA) as stream:
            request = await wire.receive_add()
            for token in range(50):
                await wire.send_tokens(request.request_id, [token])
            await wire.send_tokens(request.request_id, [], FinishReason.ABORT)
            async with client.generate([2], DELTA) as other:
                # An answer to a later request has come by the same socket, behind them all.
                await wire.send_tokens((await wire.receive_add()).request_id, [1])
                await anext(other)
            outputs = [output async for output in stream]
    assert [output.token_ids for output in outputs] == [list(range(50))]
    assert outputs[0].finish_reason is FinishReason.ABORT


async def test_the_request_carries_what_was_asked() -> None:
    adapter = LoRARequest("a", 1, "/a")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_pair() as (client, wire),
            client.generate(
                [1, 2],
                SamplingParams(max_tokens=None, seed=5),
                request_id="mine",
                priority=3,
                lora_request=adapter,
                cache_salt="salt",
                trace_headers={"traceparent": "x"},
            ) as stream,
        ):
            request = await wire.receive_add()
            assert stream.request_id == "mine"
    assert request.external_req_id == "mine"
    assert request.request_id.startswith("mine-")
    assert int(request.request_id.removeprefix("mine-"), 16) >= 0
    assert len(request.request_id) == len("mine-") + 8
    assert request.prompt_token_ids == [1, 2]
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == 1022  # of max_model_len 1024
    assert request.sampling_params.seed == 5
    assert (request.priority, request.cache_salt) == (3, "salt")
    assert request.lora_request == adapter
    assert request.trace_headers == {"traceparent": "x"}


async def test_logprobs_keep_the_width_that_was_asked_for() -> None:
    def rows(width: int) -> LogprobsLists:
        return LogprobsLists(
            np.arange(width, dtype=np.int64)[None],
            np.zeros((1, width), dtype=np.float32),
            np.ones(1, dtype=np.int64),
        )

    params = SamplingParams(logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], params) as stream:
            request_id = (await wire.receive_add()).request_id
            for width in (2, 6):  # as wide as the batch's widest
                entry = EngineCoreOutput(request_id, [0], new_logprobs=rows(width))
                await wire.send(EngineCoreOutputs(outputs=[entry]))
            await wire.send_tokens(request_id, [], FinishReason.LENGTH)
            output = await anext(stream)
    assert output.logprobs is not None
    assert output.logprobs.logprob_token_ids.tolist() == [[0, 1], [0, 1]]
    assert output.logprobs.sampled_token_ranks.tolist() == [1, 1]


async def test_cached_tokens_come_from_the_first_entry() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], DELTA) as stream:
            request = await wire.receive_add()
            stats = PrefillStats(num_prompt_tokens=1, num_cached_tokens=1)
            entry = EngineCoreOutput(request.request_id, [7], prefill_stats=stats)
            await wire.send(EngineCoreOutputs(outputs=[entry]))
            assert (await anext(stream)).num_cached_tokens == 1
            await wire.send_tokens(request.request_id, [8], FinishReason.LENGTH)
            assert (await anext(stream)).num_cached_tokens == 1


async def test_text_streams_and_a_stop_string_ends_it_with_one_abort() -> None:
    """The engine knows no strings: what it sends behind the stop is dropped."""
    tokenizer = make_letter_tokenizer()
    params = SamplingParams(stop="END", output_kind=RequestOutputKind.DELTA, max_tokens=100)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair(tokenizer=tokenizer) as (client, wire):
            async with client.generate("hi", params) as stream:
                request = await wire.receive_add()
                assert request.prompt_token_ids == tokenizer.encode("hi")
                await wire.send_tokens(request.request_id, tokenizer.encode("abcE"))
                assert (await anext(stream)).text == "abc"  # the E may be the stop's
                await wire.send_tokens(request.request_id, tokenizer.encode("xEN"))
                assert (await anext(stream)).text == "Ex"
                await wire.send_tokens(request.request_id, tokenizer.encode("Dmore"))
                last = await anext(stream)
                assert (last.text, last.finish_reason) == ("", FinishReason.STOP)
                assert last.stop_reason == "END"
                assert last.num_output_tokens == len("abcExEND")
                # Without waiting for the reader to leave.
                assert await wire.receive_abort() == [request.request_id]
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            await fence(client, wire)
            assert wire.aborted_ids == [request.request_id]


async def test_an_abort_by_name_lets_go_of_text_that_was_held_back() -> None:
    tokenizer = make_letter_tokenizer()
    params = SamplingParams(stop="END", output_kind=RequestOutputKind.DELTA, max_tokens=100)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_pair(tokenizer=tokenizer) as (client, wire),
            client.generate("hi", params, request_id="x") as stream,
        ):
            request = await wire.receive_add()
            await wire.send_tokens(request.request_id, tokenizer.encode("abE"))
            assert (await anext(stream)).text == "ab"
            client.abort("x")
            last = await anext(stream)
    assert (last.text, last.finish_reason) == ("E", FinishReason.ABORT)


async def test_a_long_text_is_tokenized_beside_the_other_streams() -> None:
    tokenizer = make_letter_tokenizer()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair(tokenizer=tokenizer) as (client, _):
            with pytest.raises(RequestError, match="shorter than max_model_len"):
                await client.complete("x" * 20_000)


async def test_complete_returns_the_whole_answer() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), trio.open_nursery() as nursery:

            async def answer() -> None:
                request = await wire.receive_add()
                await wire.send_tokens(request.request_id, [7])
                await wire.send_tokens(request.request_id, [8], FinishReason.LENGTH)

            nursery.start_soon(answer)
            output = await client.complete([1], DELTA)
            assert output.token_ids == [7, 8]
            assert output.finish_reason is FinishReason.LENGTH


async def test_error_raises_after_the_tokens_that_came_before_it() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], DELTA) as stream:
            request = await wire.receive_add()
            await wire.send_tokens(request.request_id, [7])
            await wire.send_tokens(request.request_id, [], FinishReason.ERROR, "overloaded")
            assert (await anext(stream)).token_ids == [7]
            with pytest.raises(RequestFailedError, match="overloaded") as caught:
                await anext(stream)
            assert caught.value.request_id == stream.request_id
            assert caught.value.reason == "overloaded"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_what_the_engine_ended_is_not_aborted() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with client.generate([1], DELTA) as stream:
                request = await wire.receive_add()
                await wire.send_tokens(request.request_id, [7], FinishReason.LENGTH)
                async for _ in stream:
                    pass
            await fence(client, wire)
            assert wire.aborted_ids == []


async def test_aborted_by_name_each_stream_gets_a_last_item() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_pair() as (client, wire),
            client.generate([1], DELTA, request_id="x") as one,
            client.generate([2], DELTA, request_id="x") as two,
            client.generate([3], DELTA, request_id="y") as other,
        ):
            ids = [(await wire.receive_add()).request_id for _ in range(3)]
            assert client.abort("x")
            for stream in (one, two):
                assert (await anext(stream)).finish_reason is FinishReason.ABORT
            assert not client.abort("x")
            assert not client.abort("nobody")
            assert sorted(await wire.receive_abort()) == sorted(ids[:2])
            await wire.send_tokens(ids[0], [7])  # was on its way
            await wire.send_tokens(ids[2], [8])
            assert (await anext(other)).token_ids == [8]


async def test_aborted_by_somebody_else_a_stream_ends() -> None:
    """An engine gives no output for an ABORT; only finished_requests tells of it."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with client.generate([1], DELTA) as stream:
                request = await wire.receive_add()
                await wire.send(EngineCoreOutputs(finished_requests={request.request_id, "other"}))
                assert (await anext(stream)).finish_reason is FinishReason.ABORT
            await fence(client, wire)
            assert wire.aborted_ids == []


@pytest.mark.parametrize("how", ["not entered", "left"])
async def test_iterating_outside_of_the_block_names_the_right_form(how: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, _):
            stream = client.generate([1], DELTA)
            if how == "not entered":
                with pytest.raises(TypeError, match=r"async with engine\.generate"):
                    async for _ in stream:
                        pass
                with pytest.raises(TypeError, match=r"async with engine\.generate"):
                    await anext(stream)
            else:
                async with stream:
                    pass
                with pytest.raises(EngineClosedError, match="was left"):
                    async for _ in stream:
                        pass


async def test_a_stream_is_entered_once() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, _):
            stream = client.generate([1], DELTA)
            async with stream:
                pass
            with pytest.raises(RuntimeError, match="entered once"):
                async with stream:
                    pass


async def test_two_readers_of_one_stream_are_refused() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_pair() as (client, _),
            client.generate([1], DELTA) as stream,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(anext, stream)
            await wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await anext(stream)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], None, "empty"),
        ([-1], None, "prompt"),
        ([0] * 1024, None, "max_model_len"),
        ("text", None, "no tokenizer"),
        ([1], SamplingParams(stop="x"), "stop"),
        ([1], SamplingParams(n=2), "got n=2: use complete_all"),
        ([1], SamplingParams(n=10**9), "got n=1000000000: use complete_all"),
        ([1], SamplingParams(extra_args={"x": object()}), "object"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_leaves_nothing(
    prompt: list[int] | str, params: SamplingParams | None, message: str
) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            with pytest.raises(RequestError, match=message):
                await client.complete(prompt, params)
            assert client.statistics().num_requests == 0
            await fence(client, wire)
            assert wire.added_ids == []


async def test_max_in_flight_refuses_and_a_place_is_free_again_at_once() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair(max_in_flight=1) as (client, wire):
            async with client.generate([1], DELTA):
                with pytest.raises(OverloadedError, match="max_in_flight"):
                    await client.complete([2])
            async with client.generate([3], DELTA):
                await fence(client, wire)
                assert client.statistics().num_requests == 1


async def test_scheduler_gauges_are_the_newest_and_prefix_numbers_add_up() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            for running, hits in ((4, 16), (3, 32)):
                prefix = PrefixCacheStats(requests=1, hits=hits, reset=running == 4)
                stats = SchedulerStats(num_running_reqs=running, prefix_cache_stats=prefix)
                await wire.send(EngineCoreOutputs(scheduler_stats=stats))
            await fence(client, wire)
            scheduler = client.statistics().scheduler[0]
    assert scheduler.num_running_reqs == 3
    assert scheduler.prefix_cache_stats == PrefixCacheStats(requests=2, hits=48, reset=True)


async def test_later_changes_to_the_callers_objects_have_no_effect() -> None:
    prompt = [1, 2]
    params = SamplingParams(stop_token_ids=[5], output_kind=RequestOutputKind.DELTA)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate(prompt, params):
            prompt.append(3)
            params.max_tokens = 99
            assert params.stop_token_ids is not None
            params.stop_token_ids.append(6)
            request = await wire.receive_add()
    assert request.prompt_token_ids == [1, 2]
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens == 16
    assert request.sampling_params.stop_token_ids == [5]


async def test_a_misspelt_option_is_a_type_error_and_a_wrong_one_names_itself() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, _):
            wrong: dict[str, Any] = {"max_tokens": 5}
            with pytest.raises(TypeError, match="no option 'max_tokens'; there are request_id"):
                client.generate([1], **wrong)
            for name, value in (("request_id", 5), ("priority", "a"), ("cache_salt", 4)):
                wrong = {name: value}
                with pytest.raises(RequestError, match=f"{name} must be of type"):
                    client.generate([1], **wrong)
