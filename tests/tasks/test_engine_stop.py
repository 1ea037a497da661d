"""An engine in the test's nursery that is asked to stop, drained, or cancelled."""

from __future__ import annotations

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import (
    CONFIG,
    PROMPT,
    TEST_TIMEOUT_S,
    check_nothing_held,
    null_tokens,
    open_scripted,
    reader_sockets,
)
from trio_engine.engine.engine_core_proc import (
    EngineCoreProc,
)
from trio_engine.engine.step_loop import SHUTTING_DOWN
from trio_engine.outputs import FinishReason
from trio_engine.testing.scripted_executor import ScriptedExecutor
from trio_engine.testing.wire_front_end import WireFrontEnd


@pytest.mark.known_fault(kind="careless-drain")
async def test_a_stop_without_a_drain_aborts_everything_and_returns() -> None:
    async with open_scripted(ends_by_itself=True, num_clients=2) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        for index in range(6):  # four run, two wait
            await front_end.add(f"r{index}", PROMPT, client=index % 2)
        await gate.wait_held()
        proc.shutdown.request("the test")
        for index in range(6):  # told while the step still runs
            log = await front_end.finish(f"r{index}", client=index % 2)
            assert (log.token_ids, log.finish_reason) == ([], FinishReason.ABORT)
        check_nothing_held(proc)


async def test_what_comes_while_the_last_step_is_waited_for_is_refused() -> None:
    async with open_scripted(ends_by_itself=True) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("x", PROMPT)
        await gate.wait_held()
        proc.shutdown.request("the test")
        await front_end.finish("x")
        await front_end.add("late", PROMPT)
        assert (await front_end.finish("late")).finish_reason is FinishReason.ABORT
        assert (await front_end.call_utility("is_sleeping")).failure_message == SHUTTING_DOWN


async def test_everything_that_it_took_before_it_left_is_answered() -> None:
    """More than the inbox holds: the rest is in ZeroMQ when the readers end, or on its way."""
    async with open_scripted(ends_by_itself=True) as (front_end, proc, _):
        (socket,) = reader_sockets(proc)
        for index in range(500):
            await front_end.add(f"r{index}", PROMPT, max_tokens=60)
        await front_end.wait_num_tokens("r0", 1)
        proc.shutdown.request("the test")
        while not socket.statistics().closed:
            await trio.lowlevel.checkpoint()
        num_taken = socket.statistics().messages_received
        assert num_taken > 0
        for index in range(num_taken):
            assert (await front_end.finish(f"r{index}")).finish_reason is not None
        check_nothing_held(proc)


@pytest.mark.known_fault(kind="careless-drain")
async def test_a_drain_ends_with_the_last_request_and_refuses_new_ones() -> None:
    config = msgspec.structs.replace(CONFIG, shutdown_timeout_s=60.0, max_num_seqs=1)
    async with open_scripted(ends_by_itself=True, config=config) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("running", PROMPT, max_tokens=3)
        await front_end.add("waiting", PROMPT, max_tokens=3)
        await front_end.add("aborted", PROMPT, max_tokens=3)
        await gate.wait_held()
        await front_end.call_utility("is_sleeping")  # so all of it was taken
        proc.shutdown.request("the test")
        await wait_all_tasks_blocked()
        await front_end.add("late", PROMPT)
        assert (await front_end.finish("late")).finish_reason is FinishReason.ABORT
        assert (await front_end.call_utility("is_sleeping")).failure_message == SHUTTING_DOWN
        await front_end.abort("aborted")
        gate.open()
        for request_id in ("running", "waiting"):
            log = await front_end.finish(request_id)
            assert (log.token_ids, log.finish_reason) == (null_tokens(3), FinishReason.LENGTH)
        assert front_end.logs[(0, "aborted")].outputs == []


@pytest.mark.known_fault(kind="careless-drain")
@pytest.mark.parametrize("ending", ["deadline", "second request", "owner is gone"])
async def test_a_drain_that_is_cut_short_aborts_the_rest(ending: str) -> None:
    timeout_s = 0.1 if ending == "deadline" else 60.0
    config = msgspec.structs.replace(CONFIG, shutdown_timeout_s=timeout_s)
    async with open_scripted(ends_by_itself=True, config=config) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("x", PROMPT)
        await gate.wait_held()
        gate.let_pass(2)
        await gate.wait_held()
        proc.shutdown.request("the test")
        await wait_all_tasks_blocked()
        if ending == "second request":
            proc.shutdown.request("the test")
        elif ending == "owner is gone":
            proc.shutdown.lose_owner()
        log = await front_end.finish("x")
        assert (log.token_ids, log.finish_reason) == (null_tokens(2), FinishReason.ABORT)


async def test_a_drain_while_paused_ends() -> None:
    config = msgspec.structs.replace(CONFIG, shutdown_timeout_s=60.0)
    async with open_scripted(ends_by_itself=True, config=config) as (front_end, proc, _):
        await front_end.call_utility("pause_scheduler", "keep")
        await front_end.add("x", PROMPT, max_tokens=2)
        await front_end.call_utility("is_scheduler_paused")
        proc.shutdown.request("the test")
        assert (await front_end.finish("x")).finish_reason is FinishReason.LENGTH


async def test_a_pending_utility_call_is_answered_at_the_end() -> None:
    async with open_scripted(ends_by_itself=True) as (front_end, proc, executor):
        executor.gates["command"].close()
        call_id = await front_end.post_utility("collective_rpc", "echo")
        await executor.gates["command"].wait_held()
        proc.shutdown.request("the test")
        await wait_all_tasks_blocked()
        executor.gates["command"].open()
        assert (await front_end.wait_answer(call_id)).failure_message == SHUTTING_DOWN


@pytest.mark.known_fault(kind="uncancellable-thread")
async def test_cancelling_it_is_a_stop_without_a_drain() -> None:
    """The caller's scope: the running step is waited for, every client is told, nothing raised."""
    config = msgspec.structs.replace(CONFIG, shutdown_timeout_s=60.0)
    executor = ScriptedExecutor(config)
    gate = executor.gates["collect"]
    with trio.fail_after(TEST_TIMEOUT_S), executor.gates_open_at_end():
        async with WireFrontEnd(2) as front_end:
            proc = EngineCoreProc(
                config, lambda _: executor, handshake_address=front_end.handshake_address
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(proc.run)
                await front_end.start_up()
                gate.close()
                for client in range(2):
                    await front_end.add("x", PROMPT, client=client)
                    await front_end.call_utility("is_sleeping", client=client)
                await gate.wait_held()
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    assert nursery.child_tasks, "it must wait for the thread"
                    gate.open()
            for client in range(2):
                log = await front_end.finish("x", client=client)
                assert log.finish_reason is FinishReason.ABORT
            check_nothing_held(proc)
            assert executor.calls[-1] == "shutdown"
            num_calls = len(executor.calls)
            await wait_all_tasks_blocked(0.05)
            assert len(executor.calls) == num_calls


async def test_a_stop_before_it_is_ready_ends_it_quietly() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd() as front_end:
            proc = EngineCoreProc(
                CONFIG, ScriptedExecutor, handshake_address=front_end.handshake_address
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(proc.run)
                await front_end.receive_handshake()
                assert proc.statistics() is None
                proc.shutdown.request("the test")
