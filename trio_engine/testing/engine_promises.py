"""What ``check_engine`` asks of a live engine, one function for each promise.

Public kit. Imports neither torch nor pytest. The tables below say each promise in words. A function
raises AssertionError if it is broken; one that hangs is ended by its caller.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from trio_engine.outputs import FinishReason
from trio_engine.testing.live_engine import NUM_CLIENTS, NUM_TOKENS, PROMPT
from trio_engine.testing.wire_faults import WIRE_FAULTS, Fate, FaultContext, WireFault

if TYPE_CHECKING:
    from trio_engine.testing.live_engine import LiveEngine

Promise = Callable[["LiveEngine"], Awaitable[None]]
"""Checks one promise of a live engine."""

RUBBISH_EXIT_LIMIT_S = 10.0
"""An engine may look twice at an INIT that it does not understand, but not wait for another."""

FIRST_CALL_ID = 1 << 40
"""Of faulty calls: far from those that ``WireFrontEnd`` counts."""

ANOTHER_PROMPT = [8, 9]


# Serving


async def answers_a_request(live: LiveEngine) -> None:
    log = await live.complete(PROMPT)
    assert len(log.token_ids) == NUM_TOKENS, f"{len(log.token_ids)} tokens for {NUM_TOKENS}"
    assert log.finish_reason is FinishReason.LENGTH, f"it ends with {log.finish_reason!s}"
    assert log.token_ids == live.solo_token_ids, "other tokens than the first time"


async def answers_many_at_once(live: LiveEngine) -> None:
    ids = [live.new_id() for _ in range(20)]
    for number, request_id in enumerate(ids):
        client = number % NUM_CLIENTS
        await live.front_end.add(
            request_id, PROMPT, client=client, max_tokens=NUM_TOKENS, ignore_eos=True
        )
    for number, request_id in enumerate(ids):
        log = await live.front_end.finish(request_id, client=number % NUM_CLIENTS)
        assert log.token_ids == live.solo_token_ids, "a neighbour changes an answer"


async def keeps_ids_of_clients_apart(live: LiveEngine) -> None:
    request_id = live.new_id()
    for client in range(NUM_CLIENTS):
        await live.front_end.add(
            request_id, PROMPT, client=client, max_tokens=NUM_TOKENS, ignore_eos=True
        )
    for client in range(NUM_CLIENTS):
        log = await live.front_end.finish(request_id, client=client)
        assert log.token_ids == live.solo_token_ids, f"client {client} got other tokens"


async def aborts_a_request(live: LiveEngine) -> None:
    alone = (await live.complete(ANOTHER_PROMPT)).token_ids
    request_id = await _start_long(live)
    await live.front_end.abort(request_id)
    # Behind the answer nothing is left of what was on its way to this client when ABORT came.
    await live.front_end.call_utility("get_supported_tasks")
    # Whatever comes now is taken for the new one's.
    await live.front_end.add(request_id, ANOTHER_PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    log = await live.front_end.finish(request_id)
    assert log.finish_reason is FinishReason.LENGTH, f"the new one ends with {log.finish_reason!s}"
    assert log.token_ids == alone, "the new one gets the old one's tokens"


async def aborts_in_the_same_burst(live: LiveEngine) -> None:
    request_id = live.new_id()
    await live.front_end.add(request_id, PROMPT, max_tokens=live.max_model_len - 10)
    await live.front_end.abort(request_id)
    await answers_a_request(live)
    log = live.front_end.logs[(0, request_id)]
    assert log.finish_reason is None, f"an output with {log.finish_reason!s} after the ABORT"


async def aborts_only_the_clients_own(live: LiveEngine) -> None:
    request_id = live.new_id()
    await live.front_end.add(request_id, PROMPT, max_tokens=200, ignore_eos=True)
    await live.front_end.wait_num_tokens(request_id, 1)
    await live.front_end.abort(request_id, client=1)
    log = await live.front_end.finish(request_id)
    assert log.finish_reason is FinishReason.LENGTH, f"it ends with {log.finish_reason!s}"


# Utility calls


async def answers_calls(live: LiveEngine) -> None:
    for client in range(NUM_CLIENTS):
        answer = await live.front_end.call_utility("get_supported_tasks", client=client)
        assert answer.result is not None, f"no result: {answer.failure_message}"
        assert "generate" in answer.result.value, f"the result is {answer.result.value!r}"


async def fails_unknown_calls(live: LiveEngine) -> None:
    answer = await live.front_end.call_utility("no such method")
    assert answer.failure_message, f"it gave {answer.result!r}"


async def pauses_and_resumes(live: LiveEngine) -> None:
    request_id = live.new_id()
    await live.front_end.add(request_id, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    for method, *args in (("pause_scheduler", "keep", False), ("resume_scheduler",)):
        answer = await live.front_end.call_utility(str(method), *args)
        assert answer.failure_message is None, f"{method}: {answer.failure_message}"
    log = await live.front_end.finish(request_id)
    assert log.token_ids == live.solo_token_ids, "other tokens than without the pause"


# Faults


async def survives(live: LiveEngine, fault: WireFault) -> None:
    """A fault gets its fate, the stream beside it is not changed, and the engine hears on."""
    front_end = live.front_end
    context = FaultContext(
        live.new_id(), live.new_id(), FIRST_CALL_ID + WIRE_FAULTS.index(fault), live.max_model_len
    )
    bad = front_end.listen(context.bad_id)
    await front_end.add(context.live_id, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    await front_end.wait_num_tokens(context.live_id, 1)
    await front_end.send_frames(fault.frames(context))
    stream = await front_end.finish(context.live_id)
    assert stream.finish_reason is FinishReason.LENGTH, (
        f"the stream beside it ends with {stream.finish_reason!s}"
    )
    assert stream.token_ids == live.solo_token_ids, "the stream beside it has other tokens"
    if fault.fate is Fate.FAILED:
        answer = await front_end.wait_answer(context.call_id)
        assert answer.failure_message, f"the call succeeds: {answer.result!r}"
    elif fault.fate is Fate.REFUSED:
        await front_end.finish(context.bad_id)
        assert bad.finish_reason is FinishReason.ERROR, f"it ends with {bad.finish_reason!s}"
    await answers_a_request(live)
    if fault.fate is Fate.DROPPED:
        assert not bad.outputs, f"it is answered: {bad.outputs}"


# Ends; each needs an engine of its own


async def ends_while_idle(live: LiveEngine) -> None:
    live.send_signal(signal.SIGTERM)
    await _expect_stopped(live)


async def ends_at_sigint(live: LiveEngine) -> None:
    live.send_signal(signal.SIGINT)
    await _expect_stopped(live)


async def ends_while_it_works(live: LiveEngine) -> None:
    await _end_while_it_works(live, signal.SIGTERM)


async def ends_at_signals_that_repeat(live: LiveEngine) -> None:
    await _end_while_it_works(live, signal.SIGTERM, signal.SIGTERM, signal.SIGINT)


async def ends_at_rubbish_for_init(live: LiveEngine) -> None:
    await live.greet_only()
    await live.front_end.send_handshake([b"\xc1 no msgpack"])
    with trio.move_on_after(RUBBISH_EXIT_LIMIT_S):
        await live.process.wait()
    status = live.process.exit_status
    assert status is not None, f"it waits on after {RUBBISH_EXIT_LIMIT_S:g} s"
    assert status > 0, f"it ends like one that was asked to ({live.process.describe_exit()})"


async def ends_before_init(live: LiveEngine) -> None:
    await live.greet_only()
    live.send_signal(signal.SIGTERM)
    await _expect_stopped(live)


SERVING: dict[str, Promise] = {
    "a greedy request has max_tokens tokens, the same each time, and LENGTH": answers_a_request,
    "requests of two clients at once have one end each, at their own client": answers_many_at_once,
    "two clients may use one id at the same time": keeps_ids_of_clients_apart,
    "ABORT ends a request without an output; its id may be used again": aborts_a_request,
    "an ADD with its ABORT right behind it comes to nothing": aborts_in_the_same_burst,
    "ABORT from one client does not end another client's request": aborts_only_the_clients_own,
}
CALLS: dict[str, Promise] = {
    "utility calls are answered with a value, at the client that called": answers_calls,
    "a call of a method that does not exist is answered with a failure": fails_unknown_calls,
    "pausing with keep and resuming changes nothing of a stream": pauses_and_resumes,
}
EARLY_ENDS: dict[str, Promise] = {
    "rubbish instead of INIT ends it with a status that tells a failure": ends_at_rubbish_for_init,
    "SIGTERM while it waits for INIT ends it in time, with exit status 0": ends_before_init,
}
"""Before READY; each needs an engine of its own."""

ENDS: dict[str, Promise] = {
    "SIGTERM while idle ends it in time, with exit status 0": ends_while_idle,
    "SIGINT while idle ends it in time, with exit status 0": ends_at_sigint,
    "SIGTERM while it works ends every request with ABORT, then it": ends_while_it_works,
    "more signals while it ends change nothing of that": ends_at_signals_that_repeat,
}
"""After it; likewise."""


async def _start_long(live: LiveEngine, *, client: int = 0) -> str:
    request_id = live.new_id()
    await live.front_end.add(
        request_id,
        PROMPT,
        client=client,
        max_tokens=live.max_model_len - len(PROMPT),
        ignore_eos=True,
    )
    await live.front_end.wait_num_tokens(request_id, 1, client=client)
    return request_id


async def _end_while_it_works(live: LiveEngine, *numbers: signal.Signals) -> None:
    ids = [await _start_long(live, client=client) for client in range(NUM_CLIENTS)]
    for number in numbers:
        live.send_signal(number)
    for client, request_id in enumerate(ids):
        with trio.move_on_after(live.under_check.exit_limit_s):
            log = await live.front_end.finish(request_id, client=client)
            assert log.finish_reason is FinishReason.ABORT, f"it says {log.finish_reason!s}"
            continue
        raise AssertionError(f"client {client} is not told of the end of its request")
    await _expect_stopped(live)


async def _expect_stopped(live: LiveEngine) -> None:
    status = await live.wait_exit()
    assert status == 0, f"exit status {status}" if status > 0 else live.process.describe_exit()
