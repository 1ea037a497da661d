"""What every client of an engine must do, as one async call.

Public kit. Imports neither torch nor zmq nor pytest; hand it what opens a client of your own, as
``tests/process/test_check_client.py`` does for those of this package. What a client does when it
or its engine ends is in ``check_client_ends``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import trio

from trio_engine.errors import EngineClosedError, RequestError, UtilityError
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.testing.check_client_ends import (
    LONG,
    SHORT,
    MadeUpError,
    check_body_errors,
    check_closing,
    check_death,
    check_limit,
    check_nothing_held,
)
from trio_engine.testing.leak_guard import DEFAULT_GRACE_S, find_leaks, take_snapshot

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient
    from trio_engine.client.outputs import RequestOutput
    from trio_engine.client.stream import RequestStream
    from trio_engine.testing.check_client_ends import KillEngine, OpenClient
    from trio_engine.testing.leak_guard import Snapshot

PROMPTS = [[10], [20, 21], [30, 31, 32], [40]]
NUM_TOKENS = 6
NUM_ANSWERS = 3

DELTAS = SamplingParams(
    temperature=0.0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)

LIMIT_S = 30.0
"""No promise waits for time to pass; this ends one that would hang."""


async def check_client(
    open_client: OpenClient, *, kill_engine: KillEngine | None = None, limit_s: float = LIMIT_S
) -> None:
    """Checks an implementation of ``EngineClient``, from its opening to its end.

    Its engine must give the same tokens for the same greedy request, serve eight requests at once,
    know the token ids up to 255, allow 128 tokens a request, and take a millisecond or more for a
    step: of a faster one nothing is left to abort. Works under a mock clock too, if the client
    does.

    Args:
        open_client: opens a client by itself; called several times, one after the other, with the
            ``max_in_flight`` that it is to keep.
        kill_engine: has the client's engine die. Without it, what happens then is not checked.
        limit_s: for each step of the check, by Trio's clock.

    Raises:
        AssertionError: the client breaks a promise; which one is in the message.
        trio.TooSlowError: it does not answer within ``limit_s``.
    """
    before = take_snapshot()
    try:
        async with open_client(None) as client:
            for check in REQUEST_CHECKS:
                with trio.fail_after(limit_s):
                    await check(client)
                    await check_nothing_held(client)
        for check_end in (check_limit, check_closing, check_body_errors):
            with trio.fail_after(limit_s):
                await check_end(open_client)
        if kill_engine is not None:
            with trio.fail_after(limit_s):
                await check_death(open_client, kill_engine)
    except ExceptionGroup as group:  # of a nursery of the check's own
        raise _first(group) from group
    await _check_no_leaks(before)


async def _check_answers(client: EngineClient) -> None:
    for prompt in PROMPTS:
        first, second = [await client.complete(prompt, SHORT) for _ in range(2)]
        assert len(first.token_ids) == NUM_TOKENS, f"max_tokens is {NUM_TOKENS}: {first}"
        assert first.finish_reason is FinishReason.LENGTH, f"no LENGTH at max_tokens: {first}"
        assert first.num_output_tokens == NUM_TOKENS, f"the tokens are counted wrong: {first}"
        assert first.num_prompt_tokens == len(prompt), f"the prompt is counted wrong: {first}"
        assert first.token_ids == second.token_ids, "a greedy request has two answers"


async def _check_output_kinds(client: EngineClient) -> None:
    whole = (await client.complete(PROMPTS[0], DELTAS)).token_ids
    deltas = await _items(client, RequestOutputKind.DELTA)
    assert [token for item in deltas for token in item.token_ids] == whole, "deltas do not add up"
    sums = await _items(client, RequestOutputKind.CUMULATIVE)
    for item in sums:
        assert item.token_ids == whole[: len(item.token_ids)], f"no beginning of all: {item}"
    assert sums[-1].token_ids == whole, "the last item does not hold everything"
    (final,) = await _items(client, RequestOutputKind.FINAL_ONLY)
    assert final.token_ids == whole, "the only item does not hold everything"


async def _items(client: EngineClient, kind: RequestOutputKind) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, output_kind=kind)
    async with client.generate(PROMPTS[0], params) as stream:
        items = await _read(stream)
        assert not await _read(stream), "there is more after the last item"
    counts = [item.num_output_tokens for item in items]
    assert counts == sorted(counts), f"counts fall: {counts}"
    assert [item.finished for item in items].index(True) == len(items) - 1, "an end in between"
    return items


async def _check_neighbours(client: EngineClient) -> None:
    alone = [(await client.complete(prompt, DELTAS)).token_ids for prompt in PROMPTS]
    together: dict[int, list[int]] = {}

    async def ask(number: int) -> None:
        async with client.generate(PROMPTS[number], DELTAS) as stream:
            items = await _read(stream)
        together[number] = [token for item in items for token in item.token_ids]

    async with trio.open_nursery() as nursery:
        for number in range(len(PROMPTS)):
            nursery.start_soon(ask, number)
    for number, token_ids in enumerate(alone):
        assert together[number] == token_ids, "a neighbour changes an answer"


async def _check_several_answers(client: EngineClient) -> None:
    several = SamplingParams(
        temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True, n=NUM_ANSWERS
    )
    answers, again = [await client.complete_all(PROMPTS[0], several) for _ in range(2)]
    assert [answer.index for answer in answers] == list(range(NUM_ANSWERS)), "not in order"
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in again], (
        "seeded answers are others the second time"
    )
    async with client.generate(PROMPTS[0], several) as stream:
        ends = [item.index for item in await _read(stream) if item.finished]
    assert sorted(ends) == list(range(NUM_ANSWERS)), f"not one end for each answer: {ends}"


async def _check_slow_reader(client: EngineClient) -> None:
    whole = (await client.complete(PROMPTS[0], DELTAS)).token_ids
    async with client.generate(PROMPTS[0], DELTAS) as stream:
        first = await anext(stream)
        await client.complete(PROMPTS[1], DELTAS)  # is not held up
        rest = await _read(stream)
    token_ids = [token for item in (first, *rest) for token in item.token_ids]
    assert token_ids == whole, "a reader that comes late misses tokens"


async def _check_leaving(client: EngineClient) -> None:
    async with client.generate(PROMPTS[0], LONG) as stream:
        await anext(stream)
    assert client.statistics().num_requests == 0, "leaving a stream's block does not end it"
    try:
        async with client.generate(PROMPTS[0], LONG):
            raise MadeUpError
    except MadeUpError:
        assert client.statistics().num_requests == 0, "an error in the block leaves it open"
    with trio.CancelScope() as scope:
        async with client.generate(PROMPTS[0], LONG) as stream:
            await anext(stream)
            scope.cancel()
            await _read(stream)
    assert scope.cancelled_caught, "a stream swallows a cancellation"
    assert client.statistics().num_requests == 0, "a cancelled block leaves its request open"


async def _check_time_limits(client: EngineClient) -> None:
    alone = (await client.complete(PROMPTS[1], DELTAS)).token_ids
    async with client.generate(PROMPTS[1], DELTAS) as other:
        first = await anext(other)
        with trio.move_on_after(0.02) as scope:
            await client.complete(PROMPTS[0], LONG)
        assert scope.cancelled_caught, "complete outlasts a time limit"
        rest = await _read(other)
    token_ids = [token for item in (first, *rest) for token in item.token_ids]
    assert token_ids == alone, "a time limit of one request hurts another"


async def _check_abort_by_name(client: EngineClient) -> None:
    async with (
        client.generate(PROMPTS[0], LONG, request_id="name") as one,
        client.generate(PROMPTS[1], LONG, request_id="name") as two,
    ):
        await anext(one)
        assert client.abort("name"), "abort does not find an open request"
        for stream in (one, two):
            last = (await _read(stream))[-1]
            assert last.finish_reason is FinishReason.ABORT, f"no ABORT after abort(): {last}"
        assert not client.abort("name"), "abort finds what has ended"
    assert not client.abort("nobody"), "abort finds what never was"


async def _check_name_again(client: EngineClient) -> None:
    alone = (await client.complete(PROMPTS[1], SHORT)).token_ids
    for _ in range(5):
        async with client.generate(PROMPTS[0], LONG, request_id="again") as stream:
            await anext(stream)
        again = await client.complete(PROMPTS[1], SHORT, request_id="again")
        assert again.finish_reason is FinishReason.LENGTH, "an old ABORT hits a new request"
        assert again.token_ids == alone, "an old request's tokens come under a new one's name"


async def _check_utilities(client: EngineClient) -> None:
    tasks = await client.call_utility("get_supported_tasks")
    assert "generate" in tasks, f"get_supported_tasks gave {tasks!r}"
    try:
        await client.call_utility("no such method")
    except UtilityError:
        pass
    else:
        raise AssertionError("a call that the engine refuses does not raise UtilityError")
    try:
        await client.call_utility("get_supported_tasks", object())
    except RequestError:
        pass
    else:
        raise AssertionError("an argument without a wire form does not raise RequestError")
    with trio.CancelScope() as scope:
        scope.cancel()
        await client.call_utility("get_supported_tasks")
    assert client.statistics().num_utility_calls == 0, "a cancelled call is still waited for"


async def _check_mistakes(client: EngineClient) -> None:
    (known,) = {r.max_model_len for r in client.engines.values() if r is not None}
    for prompt in ([], [1] * known, [-1], [1.5], None):
        try:
            await client.complete(prompt, SHORT)  # type: ignore[arg-type]
        except RequestError:
            assert client.statistics().num_requests == 0, "something is left of a bad request"
        else:
            raise AssertionError(f"prompt {prompt!r:.40} does not raise RequestError")


async def _check_misuse(client: EngineClient) -> None:
    stream = client.generate(PROMPTS[0], LONG)
    try:
        await _read(stream)
    except TypeError:
        pass
    else:
        raise AssertionError("a stream outside of its block can be iterated")
    async with stream:
        try:
            await stream.__aenter__()
        except RuntimeError:
            pass
        else:
            raise AssertionError("a stream can be entered twice")
    try:
        await anext(stream)
    except EngineClosedError:
        pass
    else:
        raise AssertionError("a stream goes on after its block")


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _read(stream: RequestStream) -> list[RequestOutput]:
    return [item async for item in stream]


async def _check_no_leaks(before: Snapshot) -> None:
    # By the real clock, since threads and processes end by it; the waits are Trio's, or the tasks
    # that end them would not run.
    deadline = time.monotonic() + DEFAULT_GRACE_S
    while leaks := find_leaks(before):
        assert time.monotonic() < deadline, "left behind: " + "; ".join(leaks)
        await trio.sleep(0.01)


REQUEST_CHECKS = (
    _check_answers,
    _check_output_kinds,
    _check_neighbours,
    _check_several_answers,
    _check_slow_reader,
    _check_leaving,
    _check_time_limits,
    _check_abort_by_name,
    _check_name_again,
    _check_utilities,
    _check_mistakes,
    _check_misuse,
)
