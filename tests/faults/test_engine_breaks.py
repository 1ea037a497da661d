"""An engine breaks under the client that owns it; the client is in this process."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fair_time import wait_within
from tests.faults.breaking_engines import (
    CLOSE_SIGNAL,
    EXIT_STATUS,
    FALLS_SILENT,
    GARBLED_TOKENS,
    GARBLES,
    NUM_TOKENS_BEFORE_SILENCE,
    REACHED,
    breaks_at_start,
    serves,
)
from tests.faults.matrix import Fault, Means, Moment, Promise, Side
from tests.faults.rows import faults
from tests.process.processes import child_pids
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import EngineDeadError, EngineStartError
from trio_engine.executor.null import null_token
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from trio_engine.client.base import EngineClient
    from trio_engine.client.stream import RequestStream

NULL = EngineConfig(executor="null")
TEST_TIMEOUT_S = 40.0
NEWS_S = 2.0
"""The promise: from an engine's end to the news of it at every waiter."""
TERMINATE_TIMEOUT_S = 0.3
END_S = 4.0
"""What leaving a block may take beyond ``TERMINATE_TIMEOUT_S``; 0.1 s on a machine of one's own."""
FROZEN_S = 0.2
"""How long nothing must come of a frozen engine before it counts as frozen."""
PROMPT = [1, 2, 3]
LONG = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=1500, ignore_eos=True)


@pytest.fixture(autouse=True)
def engine_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "trio_engine")
    return caplog


# While it starts

MISSING = {Moment.BEFORE_HELLO: "HELLO", Moment.BEFORE_READY: "READY", Moment.LOADING: "READY"}
"""What an engine has not said yet."""
HOW_IT_FAILS = {
    Means.CLOSE: f"exit status {EXIT_STATUS}",
    Means.KILL: "killed by SIGKILL",
    Means.MALFORMED: "protocol",
}
"""What is told of a start that fails at once."""


@pytest.mark.known_fault(kind="bad-address")
@faults(Side.ENGINE, promise=Promise.START_FAILS)
async def test_a_start_fails_at_once_or_at_its_deadline(
    fault: Fault, engine_log: pytest.LogCaptureFixture
) -> None:
    is_seen = fault.means in HOW_IT_FAILS
    # Else a deadline tells something only if it left the engine time to come so far.
    for timeout_s in [TEST_TIMEOUT_S] if is_seen else [1.0, 5.0, 25.0]:
        engine_log.clear()
        started = time.time()
        error = await start_in_vain(breaks_at_start(fault.moment, fault.means), timeout_s)
        ended = time.time()
        at_deadline = rf"within {timeout_s:g} s.*missing: .*{MISSING[fault.moment]}"
        is_told = re.search(HOW_IT_FAILS.get(fault.means, at_deadline), str(error))
        reached = [r.created for r in engine_log.records if r.getMessage() == REACHED]
        if is_told and reached:
            break
    assert is_told, error
    assert len(reached) == 1
    assert is_seen or error.exit_status is None
    since = reached[0] if is_seen else started + timeout_s
    assert ended - since < TERMINATE_TIMEOUT_S + END_S


async def start_in_vain(command: list[str], start_timeout_s: float) -> EngineStartError:
    with trio.fail_after(TEST_TIMEOUT_S), pytest.raises(EngineStartError) as caught:
        async with open_engine(
            NULL,
            command=command,
            start_timeout_s=start_timeout_s,
            terminate_timeout_s=TERMINATE_TIMEOUT_S,
        ):
            raise AssertionError("it has started")
    return caught.value


# While it serves


class Running:
    """A started engine, its process, and a stream to it."""

    def __init__(self, client: EngineClient, pid: int) -> None:
        self.client = client
        self.pid = pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def break_by(self, means: Means) -> None:
        self.send(
            {
                Means.CLOSE: CLOSE_SIGNAL,
                Means.KILL: signal.SIGKILL,
                Means.STOP: signal.SIGSTOP,
            }[means]
        )


@asynccontextmanager
async def open_running(command: list[str]) -> AsyncIterator[Running]:
    before = child_pids()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(
            NULL, command=command, terminate_timeout_s=TERMINATE_TIMEOUT_S
        ) as client:
            (pid,) = child_pids() - before
            yield Running(client, pid)


async def reach(moment: Moment, running: Running, log: pytest.LogCaptureFixture) -> None:
    """Returns at the moment, if it takes more than what was sent."""
    if moment is Moment.DRAINING:
        running.send(signal.SIGTERM)
        await wait_logged("stop_requested", log)


async def wait_logged(text: str, log: pytest.LogCaptureFixture) -> None:
    while text not in log.text:  # noqa: ASYNC110  # a log, not an event
        await trio.sleep(0.005)


HOW_IT_ENDED = {
    Means.CLOSE: (EXIT_STATUS, f"exit status {EXIT_STATUS}"),
    Means.KILL: (-signal.SIGKILL, "killed by SIGKILL"),
}


async def expect_death(means: Means, waiter: Callable[..., Awaitable[object]], *args: Any) -> None:
    exit_status, words = HOW_IT_ENDED[means]
    with pytest.raises(EngineDeadError, match=words) as caught:
        await waiter(*args)
    assert caught.value.exit_status == exit_status
    assert not caught.value.was_asked_to_stop


@pytest.mark.known_fault(kind="silent-death")
@faults(Side.ENGINE, promise=Promise.DEAD)
async def test_every_waiter_hears_of_its_death(
    fault: Fault, engine_log: pytest.LogCaptureFixture
) -> None:
    async with open_running(serves(fault.moment)) as running, trio.open_nursery() as nursery:
        client = running.client
        is_streaming = trio.Event()

        async def stream() -> None:
            async with client.generate(PROMPT, LONG) as stream:
                async for _ in stream:
                    is_streaming.set()

        def expect(waiter: Callable[..., Awaitable[object]], *args: Any) -> None:
            nursery.start_soon(expect_death, fault.means, waiter, *args)

        if fault.moment is not Moment.IDLE:
            expect(stream)
            await is_streaming.wait()
            expect(client.complete, PROMPT, LONG)
        if fault.moment is Moment.CALL_PENDING:
            expect(client.call_utility, "pause_scheduler", "wait")  # for what runs
        await wait_all_tasks_blocked()
        await client.call_utility("is_sleeping")  # comes behind what was sent on the same socket
        await reach(fault.moment, running, engine_log)
        running.break_by(fault.means)
        expect(client.complete, PROMPT, LONG)  # not sent yet
        await wait_within(NEWS_S, lambda: wait_all_told(client, nursery))
        await expect_death(fault.means, client.complete, PROMPT)
        await expect_death(fault.means, client.call_utility, "is_sleeping")


async def wait_all_told(client: EngineClient, waiters: trio.Nursery) -> None:
    await client.wait_dead()
    while waiters.child_tasks:  # noqa: ASYNC110  # their ends have no event
        await trio.sleep(0.005)


@pytest.mark.known_fault(kind="silent-death")
@faults(Side.ENGINE, promise=Promise.UNDISTURBED)
async def test_what_means_nothing_is_skipped(
    fault: Fault, engine_log: pytest.LogCaptureFixture
) -> None:
    async with open_running(GARBLES) as running:
        client = running.client
        if fault.moment is Moment.STREAMING:
            for _ in range(2):
                async with client.generate(PROMPT, LONG) as stream:
                    token_ids = [token_id async for out in stream for token_id in out.token_ids]
                assert token_ids == GARBLED_TOKENS
        for _ in range(2):
            assert await client.call_utility("anything") == "answer"
        assert not client.is_dead
    assert "output_undecodable" in engine_log.text


async def read_until_frozen(stream: RequestStream) -> list[int]:
    """Tokens that were still on their way."""
    token_ids: list[int] = []
    while True:
        with trio.move_on_after(FROZEN_S) as scope:
            token_ids += (await anext(stream)).token_ids
        if scope.cancelled_caught:
            return token_ids


@faults(Side.ENGINE, promise=Promise.WAITS)
async def test_who_waits_for_a_frozen_engine_keeps_the_say(
    fault: Fault, engine_log: pytest.LogCaptureFixture
) -> None:
    """Frozen looks like slow, so nothing raises; a deadline of one's own ends any wait."""
    async with open_running(serves(fault.moment)) as running:
        client = running.client
        async with client.generate(PROMPT, LONG) as stream:
            async with trio.open_nursery() as nursery:
                token_ids = list((await anext(stream)).token_ids)
                if fault.moment is Moment.CALL_PENDING:
                    # Answered when nothing runs any more.
                    nursery.start_soon(client.call_utility, "pause_scheduler", "wait")
                    await wait_all_tasks_blocked()
                await reach(fault.moment, running, engine_log)
                running.send(signal.SIGSTOP)
                token_ids += await read_until_frozen(stream)
                await check_deadlines_hold(client)
                running.send(signal.SIGCONT)
                token_ids += (await anext(stream)).token_ids
                if fault.moment is Moment.CALL_PENDING:
                    assert client.abort(stream.request_id)
            running.send(signal.SIGSTOP)
        assert token_ids == [null_token(PROMPT, place) for place in range(len(token_ids))]
        assert not client.is_dead
        left_at = trio.current_time()
    assert trio.current_time() - left_at < TERMINATE_TIMEOUT_S + END_S


@faults(Side.ENGINE, promise=Promise.STAYS_STUCK)
async def test_a_step_that_never_returns_holds_up_nobody_who_leaves(fault: Fault) -> None:
    async with open_running(FALLS_SILENT) as running:
        async with running.client.generate(PROMPT, LONG) as stream:
            num_tokens = 0
            while num_tokens < NUM_TOKENS_BEFORE_SILENCE:
                num_tokens += len((await anext(stream)).token_ids)
            assert await read_until_frozen(stream) == []
            assert await running.client.call_utility("is_sleeping") is False  # not deaf
            await check_deadlines_hold(running.client)
        left_at = trio.current_time()
    assert trio.current_time() - left_at < TERMINATE_TIMEOUT_S + END_S


async def check_deadlines_hold(client: EngineClient) -> None:
    for wait in (
        lambda: client.complete(PROMPT),
        lambda: client.call_utility("execute_dummy_batch"),
        client.wait_dead,
    ):
        with trio.move_on_after(0.02) as scope:
            await wait()
        assert scope.cancelled_caught
