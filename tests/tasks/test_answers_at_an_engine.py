"""Several answers to one request, with a real engine behind: each has one end, and none is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.client_and_engine import SendGate, check_nothing_left, open_client_and_engine
from tests.tasks.engine_parts import CONFIG, PROMPT, check_nothing_held
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.testing.scripted_executor import ScriptedExecutor

if TYPE_CHECKING:
    from trio_engine.client.outputs import RequestOutput

pytestmark = pytest.mark.known_fault(kind="outliving-siblings")

STOP_ID = 9
ANSWERS = [[*range(20, 20 + num_before), STOP_ID] for num_before in (0, 2, 4, 6)]
"""Of 1, 3, 5 and 7 tokens."""

FOUR = SamplingParams(
    n=4, max_tokens=50, stop_token_ids=[STOP_ID], output_kind=RequestOutputKind.DELTA
)


class TokensOfAnswers(dict[str, list[int]]):
    """What an executor draws for a child, whose id begins with its index."""

    def get(self, request_id: str, default: Any = None) -> Any:
        index, separator, _ = request_id.partition("_")
        return ANSWERS[int(index)] if separator else default


def make_executor() -> ScriptedExecutor:
    return ScriptedExecutor(CONFIG, tokens=TokensOfAnswers())


def tokens_of(outputs: list[RequestOutput], kind: RequestOutputKind) -> list[list[int]]:
    """Of each answer, from what a stream of this kind gave."""
    answers: list[list[int]] = [[] for _ in ANSWERS]
    for output in outputs:
        if kind is not RequestOutputKind.DELTA:
            answers[output.index].clear()
        answers[output.index] += output.token_ids
    return answers


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_each_of_four_answers_ends_once_at_its_own_length(kind: RequestOutputKind) -> None:
    params = msgspec.structs.replace(FOUR, output_kind=kind)
    async with open_client_and_engine(make_executor()) as (client, proc):
        async with client.generate(PROMPT, params) as stream:
            outputs = [output async for output in stream]
        ends = [(o.index, o.finish_reason, o.stop_reason) for o in outputs if o.finished]
        assert sorted(ends) == [(index, FinishReason.STOP, STOP_ID) for index in range(4)]
        assert all([o for o in outputs if o.index == index][-1].finished for index in range(4))
        assert tokens_of(outputs, kind) == ANSWERS
        await check_nothing_left(client, proc)


@pytest.mark.parametrize("way", ["aborted by name", "left"])
async def test_once_one_has_ended_an_abort_leaves_no_other_in_the_engine(way: str) -> None:
    """While the step of the others runs."""
    executor = make_executor()
    gate = executor.gates["collect"]
    gate.close()
    async with open_client_and_engine(executor) as (client, proc):
        async with client.generate(PROMPT, FOUR, request_id="x") as stream:
            await client.call_utility("is_sleeping")  # so all of them have come
            gate.let_pass(2)
            while not (first := await anext(stream)).finished:
                pass
            assert (first.index, first.token_ids) == (0, ANSWERS[0])
            await gate.wait_held()
            if way == "aborted by name":
                assert client.abort("x")
                ends = [output async for output in stream if output.finished]
                assert sorted(output.index for output in ends) == [1, 2, 3]
                assert {output.finish_reason for output in ends} == {FinishReason.ABORT}
        await client.call_utility("is_sleeping")  # goes behind all aborts
        check_nothing_held(proc)
        gate.open()
        await check_nothing_left(client, proc)


@pytest.mark.parametrize("num_sent", range(5))
async def test_cancelled_between_two_of_its_adds_a_request_leaves_no_answer_behind(
    num_sent: int,
) -> None:
    """Those that have gone are aborted, once each; the others never go."""
    executor, sending = make_executor(), SendGate()
    executor.gates["collect"].close()
    async with open_client_and_engine(executor, gate=sending) as (client, proc):
        with trio.CancelScope() as scope:
            async with client.generate(PROMPT, FOUR):
                for _ in range(num_sent):
                    await wait_all_tasks_blocked()
                    sending.let_pass()
                await wait_all_tasks_blocked()
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert client.statistics().num_requests == 0
        sending.open()
        executor.gates["collect"].open()
        await check_nothing_left(client, proc)
        del sending.added_ids[-1]  # of the check
        # One more was on its way: what a socket has been given is not taken back.
        assert num_sent <= len(sending.added_ids) <= num_sent + 1
        assert sorted(sending.aborted_ids) == sorted(sending.added_ids)
