"""The engine that a test plays by hand."""

from __future__ import annotations

from functools import partial

import trio

from tests.tasks.wire_pair import TEST_TIMEOUT_S, open_pair
from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.wire.messages import UtilityCall


async def test_several_tasks_may_send_at_once() -> None:
    """A stand-in engine answers calls while it streams."""
    answers: dict[str, object] = {}
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_pair() as (client, wire), trio.open_nursery() as nursery:

            async def ask(name: str) -> None:
                answers[name] = await client.call_utility(name)

            async def complete() -> None:
                output = await client.complete([1], SamplingParams(max_tokens=1))
                answers["tokens"] = output.token_ids

            for name in ("a", "b"):
                nursery.start_soon(ask, name)
            nursery.start_soon(complete)
            await wire.wait_num_received(3)
            for message in wire.received:
                if isinstance(message, UtilityCall):
                    nursery.start_soon(wire.answer, message, message.method)
                elif isinstance(message, EngineCoreRequest):
                    send = partial(wire.send_tokens, message.request_id, [7], FinishReason.LENGTH)
                    nursery.start_soon(send)
    assert answers == {"a": "a", "b": "b", "tokens": [7]}
