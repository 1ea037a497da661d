"""Utility calls: answers, failures, order."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.tasks.wire_pair import TEST_TIMEOUT_S, fence, open_pair
from trio_engine.errors import ProtocolError, RequestError, UtilityError
from trio_engine.outputs import EngineCoreOutputs, UtilityOutput


async def test_results_go_to_their_own_calls_in_whatever_order() -> None:
    results: dict[str, Any] = {}
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):

            async def call(method: str, *args: Any) -> None:
                results[method] = await client.call_utility(method, *args)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, "sleep", 1, "abort")
                first = await wire.receive_utility()
                nursery.start_soon(call, "list_loras")
                second = await wire.receive_utility()
                await wire.answer(second, [1, 2])
                await wire.answer(first, None)
    assert (first.client_index, first.method, first.args) == (0, "sleep", [1, "abort"])
    assert first.call_id != second.call_id
    assert results == {"sleep": None, "list_loras": [1, 2]}


async def test_a_failure_is_the_engines_message() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), trio.open_nursery() as nursery:

            async def refuse() -> None:
                await wire.refuse(await wire.receive_utility(), "Call to x method failed: no")

            nursery.start_soon(refuse)
            with pytest.raises(UtilityError, match="Call to x method failed: no"):
                await client.call_utility("x")
            assert client.statistics().num_utility_calls == 0


async def test_an_answer_without_result_or_failure_is_a_protocol_error() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), trio.open_nursery() as nursery:

            async def answer_badly() -> None:
                call = await wire.receive_utility()
                await wire.send(EngineCoreOutputs(utility_output=UtilityOutput(call.call_id)))

            nursery.start_soon(answer_badly)
            with pytest.raises(ProtocolError):
                await client.call_utility("x")


async def test_arguments_that_cannot_cross_the_wire_are_the_callers_fault() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire):
            with pytest.raises(RequestError):
                await client.call_utility("x", object())
            assert client.statistics().num_utility_calls == 0
            await fence(client, wire)


async def test_an_engine_that_has_no_statistics_says_so() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), trio.open_nursery() as nursery:

            async def refuse() -> None:
                call = await wire.receive_utility()
                assert (call.method, call.args) == ("get_statistics", [])
                await wire.refuse(call, "no method get_statistics")

            nursery.start_soon(refuse)
            with pytest.raises(UtilityError, match="no method get_statistics"):
                await client.engine_statistics()


async def test_statistics_of_another_form_are_a_protocol_error() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), trio.open_nursery() as nursery:

            async def answer_badly() -> None:
                await wire.answer(await wire.receive_utility(), {"num_steps": "many"})

            nursery.start_soon(answer_badly)
            with pytest.raises(ProtocolError, match=r"the answer to get_statistics: .*num_steps"):
                await client.engine_statistics()
