"""Nothing is lost or repeated, and there is one end, however reader and receiver interleave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio
from hypothesis import given, strategies as st
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trio_engine.client.mailbox import Mailbox
from trio_engine.client.mailbox_reader import MailboxReader
from trio_engine.outputs import EngineCoreOutput, FinishReason, LogprobsLists
from trio_engine.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from trio_engine.client.outputs import RequestOutput

DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)


def entry(*token_ids: int, logprobs: LogprobsLists | None = None) -> EngineCoreOutput:
    return EngineCoreOutput("r-0", list(token_ids), new_logprobs=logprobs)


def put(mailbox: Mailbox, *token_ids: int) -> None:
    mailbox.put(entry(*token_ids), "".join(chr(97 + i) for i in token_ids), len(token_ids))


def rows(num_rows: int, width: int) -> LogprobsLists:
    shape = (num_rows, width)
    return LogprobsLists(
        np.tile(np.arange(width), (num_rows, 1)),
        np.zeros(shape, dtype=np.float32),
        np.ones(num_rows, dtype=np.int64),
    )


async def receive(mailbox: Mailbox) -> RequestOutput:
    return await MailboxReader([mailbox]).receive()


# True: the reader takes what is there. Otherwise tokens arrive.
Moves = st.lists(st.one_of(st.just(True), st.lists(st.integers(0, 25), max_size=3)))


@given(moves=Moves, kind=st.sampled_from([DELTA, CUMULATIVE, FINAL_ONLY]))
async def test_every_token_is_given_out_once_and_in_order(
    moves: list[bool | list[int]], kind: RequestOutputKind
) -> None:
    mailbox = Mailbox("r", 3, kind)
    sent: list[int] = []
    taken: list[int] = []
    texts = ""
    for move in moves:
        if isinstance(move, list):
            put(mailbox, *move)
            sent += move
        elif mailbox.is_ready:
            output = await receive(mailbox)
            assert output.finish_reason is None
            taken = taken + output.token_ids if kind is DELTA else output.token_ids
            texts = texts + output.text if kind is DELTA else output.text
            assert taken == sent
    mailbox.finish(FinishReason.LENGTH)
    last = await receive(mailbox)
    taken = taken + last.token_ids if kind is DELTA else last.token_ids
    texts = texts + last.text if kind is DELTA else last.text
    assert taken == sent
    assert texts == "".join(chr(97 + i) for i in sent)
    assert last.num_output_tokens == len(sent)
    assert mailbox.is_exhausted


async def test_nothing_follows_the_end_and_the_first_end_counts() -> None:
    mailbox = Mailbox("r", 1, DELTA)
    put(mailbox, 1)
    mailbox.finish(FinishReason.STOP, "x")
    put(mailbox, 2)
    mailbox.finish(FinishReason.ABORT)
    mailbox.fail(ValueError())
    output = await receive(mailbox)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        [1],
        FinishReason.STOP,
        "x",
    )


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_a_failure_comes_after_what_came_before_it(kind: RequestOutputKind) -> None:
    mailbox = Mailbox("r", 1, kind)
    put(mailbox, 1)
    mailbox.fail(ValueError("x"))
    assert (await receive(mailbox)).token_ids == [1]
    with pytest.raises(ValueError, match="x"):
        await receive(mailbox)
    assert mailbox.is_exhausted


async def test_final_only_gives_no_part_of_what_failed() -> None:
    mailbox = Mailbox("r", 1, FINAL_ONLY)
    put(mailbox, 1)
    mailbox.fail(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        await receive(mailbox)


async def test_receive_is_a_checkpoint_and_takes_nothing_when_cancelled() -> None:
    mailbox = Mailbox("r", 1, DELTA)
    put(mailbox, 1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await receive(mailbox)
    assert scope.cancelled_caught
    with assert_checkpoints():
        assert (await receive(mailbox)).token_ids == [1]


async def test_a_waiting_reader_is_woken_by_the_end_alone_for_final_only() -> None:
    mailbox = Mailbox("r", 1, FINAL_ONLY)
    taken = []

    async def read() -> None:
        taken.append(await receive(mailbox))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        put(mailbox, 1)
        await wait_all_tasks_blocked()
        assert taken == []
        mailbox.finish(FinishReason.LENGTH)
    assert taken[0].token_ids == [1]


async def test_only_the_tokens_that_belong_to_the_output_are_kept() -> None:
    mailbox = Mailbox("r", 1, DELTA, num_logprobs=1)
    mailbox.put(entry(1, 2, 3, logprobs=rows(3, 5)), "a", 2)
    output = await receive(mailbox)
    assert output.token_ids == [1, 2]
    assert output.num_output_tokens == 2
    assert output.logprobs is not None
    assert output.logprobs.logprobs.shape == (2, 2)


async def test_rows_of_several_widths_are_joined_at_the_smallest() -> None:
    mailbox = Mailbox("r", 1, CUMULATIVE)
    for width in (4, 3, 6):
        mailbox.put(entry(1, logprobs=rows(1, width)), "", 1)
        output = await receive(mailbox)
    assert output.logprobs is not None
    assert output.logprobs.logprob_token_ids.tolist() == [[0, 1, 2]] * 3
    assert output.logprobs.sampled_token_ranks.shape == (3,)


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_an_empty_entry_is_no_item_before_the_failure(kind: RequestOutputKind) -> None:
    """An engine's ERROR comes in an entry without tokens, often after all else was read."""
    mailbox = Mailbox("r", 1, kind)
    put(mailbox, 1)
    assert (await receive(mailbox)).token_ids == [1]
    put(mailbox)
    mailbox.fail(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        await receive(mailbox)


async def test_several_answers_are_read_in_turn_and_each_has_its_end() -> None:
    mailboxes = [Mailbox("r", 1, DELTA, index=index) for index in range(3)]
    reader = MailboxReader(mailboxes)
    for mailbox in mailboxes[:2]:
        put(mailbox, 1)
    put(mailboxes[0], 2)
    assert [(await reader.receive()).index for _ in range(2)] == [0, 1]
    put(mailboxes[1], 3)
    put(mailboxes[0], 4)
    mailboxes[2].finish(FinishReason.LENGTH)
    last = [await reader.receive() for _ in range(3)]
    assert [(output.index, output.finished) for output in last] == [
        (2, True),
        (0, False),
        (1, False),
    ]
    assert not reader.is_ended
    for mailbox in mailboxes[:2]:
        mailbox.finish(FinishReason.STOP)
    assert reader.is_ended
    assert not reader.is_exhausted
    assert {(await reader.receive()).index for _ in range(2)} == {0, 1}
    assert reader.is_exhausted


async def test_a_waiting_reader_is_woken_by_any_answer() -> None:
    mailboxes = [Mailbox("r", 1, DELTA, index=index) for index in range(2)]
    reader = MailboxReader(mailboxes)
    taken = []

    async def read() -> None:
        taken.append(await reader.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        put(mailboxes[1], 7)
    assert [(output.index, output.token_ids) for output in taken] == [(1, [7])]


async def test_a_stream_has_one_reader_at_a_time() -> None:
    reader = MailboxReader([Mailbox("r", 1, DELTA)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.receive)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await reader.receive()
        nursery.cancel_scope.cancel()
