"""Several answers to one request (``n``): each has one end, and none outlives its reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from tests.piece_tokenizer import cut_in_two, make_piece_tokenizer
from tests.tasks.wire_pair import TEST_TIMEOUT_S, fence, make_letter_tokenizer, open_pair
from trio_engine.client.inproc_client import open_inproc_engine
from trio_engine.client.sender import MessageSender
from trio_engine.config import EngineConfig
from trio_engine.errors import OverloadedError, RequestError, RequestFailedError
from trio_engine.executor.null import NullExecutor
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient
    from trio_engine.testing.wire_engine import ScriptedWireEngine
    from trio_engine.wire.messages import EngineCoreMessage

pytestmark = pytest.mark.known_fault(kind="outliving-siblings")

FOUR = SamplingParams(n=4, max_tokens=50, output_kind=RequestOutputKind.DELTA)
FINAL = msgspec.structs.replace(FOUR, output_kind=RequestOutputKind.FINAL_ONLY)


async def take_children(wire: ScriptedWireEngine, count: int = 4) -> list[str]:
    """Internal ids of the children, by index."""
    ids = [(await wire.receive_add()).request_id for _ in range(count)]
    assert [internal_id.split("_")[0] for internal_id in ids] == [str(i) for i in range(count)]
    return ids


@pytest.mark.parametrize("params", [FOUR, FINAL], ids=["delta", "final only"])
async def test_each_answer_ends_once_whatever_the_order(params: SamplingParams) -> None:
    """After 1, 3, 5 and 7 tokens, the later ones first."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), client.generate([1], params) as stream:
            ids = await take_children(wire)
            for index in (3, 2, 1, 0):
                tokens = list(range(2 * index + 1))
                for token in tokens[:-1]:
                    await wire.send_tokens(ids[index], [token])
                await wire.send_tokens(ids[index], tokens[-1:], FinishReason.STOP)
            outputs = [output async for output in stream]
            assert client.statistics().num_requests == 0
    ends = [output.index for output in outputs if output.finished]
    assert sorted(ends) == [0, 1, 2, 3]
    for index in range(4):
        tokens = [t for output in outputs if output.index == index for t in output.token_ids]
        assert tokens == list(range(2 * index + 1))


async def test_complete_all_returns_the_answers_in_order() -> None:
    answers: list[list[int]] = []

    async def ask(client: EngineClient) -> None:
        outputs = await client.complete_all([1], FOUR, request_id="x")
        answers.extend(output.token_ids for output in outputs)

    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), trio.open_nursery() as nursery:
            nursery.start_soon(ask, client)
            ids = await take_children(wire)
            for index in (2, 0, 3, 1):
                await wire.send_tokens(ids[index], [index, index], FinishReason.LENGTH)
    assert answers == [[0, 0], [1, 1], [2, 2], [3, 3]]


async def test_leaving_aborts_those_that_have_not_ended() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with client.generate([1], FOUR) as stream:
                ids = await take_children(wire)
                await wire.send_tokens(ids[1], [5], FinishReason.STOP)
                assert (await anext(stream)).index == 1
            aborted: list[str] = []
            while len(aborted) < 3:
                aborted += await wire.receive_abort()
            assert sorted(aborted) == sorted({*ids} - {ids[1]})
            await fence(client, wire)
            assert client.statistics().num_requests == 0


async def test_an_abort_by_name_ends_every_answer() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with client.generate([1], FOUR, request_id="x") as stream:
                ids = await take_children(wire)
                await wire.send_tokens(ids[0], [5], FinishReason.STOP)
                await anext(stream)
                assert client.abort("x")
                ends = [output.finish_reason async for output in stream]
                assert ends == [FinishReason.ABORT] * 3
            assert client.statistics().num_requests == 0
            assert not client.abort("x")


async def test_an_answer_that_fails_is_raised_and_leaving_aborts_the_others() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            async with client.generate([1], FINAL) as stream:
                ids = await take_children(wire)
                await wire.send_tokens(ids[2], [], FinishReason.ERROR)
                with pytest.raises(RequestFailedError):
                    await anext(stream)
            assert client.statistics().num_requests == 0
            aborted: list[str] = []
            while len(aborted) < 3:
                aborted += await wire.receive_abort()


async def test_one_answer_stops_at_its_string_while_the_others_go_on() -> None:
    tokenizer = make_letter_tokenizer()
    params = msgspec.structs.replace(FOUR, n=2, stop="bc")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_pair(tokenizer=tokenizer) as (client, wire),
            client.generate([1], params) as stream,
        ):
            ids = await take_children(wire, 2)
            await wire.send_tokens(ids[0], tokenizer.encode("abcd"))
            assert await wire.receive_abort() == [ids[0]]
            await wire.send_tokens(ids[1], tokenizer.encode("abd"), FinishReason.LENGTH)
            texts = {0: "", 1: ""}
            ends = {}
            async for output in stream:
                texts[output.index] += output.text
                if output.finished:
                    ends[output.index] = (output.finish_reason, output.stop_reason)
    assert texts == {0: "a", 1: "abd"}
    assert ends == {0: (FinishReason.STOP, "bc"), 1: (FinishReason.LENGTH, None)}


async def test_each_of_four_answers_stops_at_a_string_that_its_tokens_cut_elsewhere() -> None:
    """At every byte, also within characters; the answers' tokens come in turn."""
    stop = "\nß\N{GRINNING FACE}:"
    cuts = cut_in_two(("ab" + stop + "cde").encode())
    tokenizer, token_of = make_piece_tokenizer(piece for pair in cuts for piece in pair)
    params = msgspec.structs.replace(FOUR, stop=["x", stop])
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair(tokenizer=tokenizer) as (client, wire):
            for four in zip(*[iter(cuts)] * 4, strict=True):
                async with client.generate([0], params) as stream:
                    ids = await take_children(wire)
                    for pieces in zip(*four, strict=True):
                        for internal_id, piece in zip(ids, pieces, strict=True):
                            await wire.send_tokens(internal_id, [token_of[piece]])
                    outputs = [output async for output in stream]
                aborted: list[str] = []
                while len(aborted) < 4:
                    aborted += await wire.receive_abort()
                assert sorted(aborted) == ids
                ends = [(o.index, o.finish_reason, o.stop_reason) for o in outputs if o.finished]
                assert sorted(ends) == [(index, FinishReason.STOP, stop) for index in range(4)]
                for index in range(4):
                    assert "".join(o.text for o in outputs if o.index == index) == "ab"
            assert client.statistics().num_requests == 0


async def test_a_request_is_sent_whole_or_not_at_all() -> None:
    """Cancelled on entering, or without room for all of its answers: no child is left."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair(max_in_flight=5) as (client, wire):
            with trio.CancelScope() as scope:
                scope.cancel()
                async with client.generate([1], FOUR):
                    raise AssertionError("unreachable")
            assert client.statistics().num_requests == 0
            async with client.generate([1], FOUR):
                with pytest.raises(OverloadedError, match="no room for 4 answers"):
                    await client.complete_all([2], FOUR)
                assert client.statistics().num_requests == 4
                await fence(client, wire)
                assert len(wire.added_ids) == 4


async def test_children_that_were_posted_are_taken_back_if_a_later_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    post = MessageSender.post

    def refuse_the_third(
        self: MessageSender, engine_index: int, key: str | int, message: EngineCoreMessage
    ) -> None:
        if str(key).startswith("2_"):
            raise RequestError("no room on the wire")
        post(self, engine_index, key, message)

    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            monkeypatch.setattr(MessageSender, "post", refuse_the_third)
            with pytest.raises(RequestError, match="no room on the wire"):
                await client.complete_all([1], FOUR)
            assert client.statistics().num_requests == 0
            monkeypatch.undo()
            await fence(client, wire)
            assert wire.added_ids == []


async def test_a_million_answers_by_mistake_are_refused() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, _):
            with pytest.raises(RequestError, match="n must be at most 16384, got 1000000"):
                client.generate([1], SamplingParams(n=1_000_000))


async def test_an_engine_holds_no_child_of_a_stream_that_was_left() -> None:
    config = EngineConfig(executor="null", num_blocks=64, max_model_len=256, max_num_seqs=3)
    params = SamplingParams(n=8, max_tokens=200, output_kind=RequestOutputKind.DELTA)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_inproc_engine(config, NullExecutor) as engine:
            for _ in range(20):
                async with engine.generate([1, 2], params) as stream:
                    await anext(stream)
            answers = await engine.complete_all([1, 2], SamplingParams(n=5, seed=7, max_tokens=4))
            assert [len(answer.token_ids) for answer in answers] == [4] * 5
            assert engine.statistics().num_requests == 0
