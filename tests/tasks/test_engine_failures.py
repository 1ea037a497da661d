"""An engine that fails after READY: one error for its caller, the news for every client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import (
    CONFIG,
    PROMPT,
    TEST_TIMEOUT_S,
    open_scripted,
    reader_sockets,
)
from trio_engine.engine.engine_core_proc import (
    NO_UTILITIES,
    EngineCoreProc,
)
from trio_engine.errors import (
    EngineDeadError,
    ProtocolError,
    RequestStepError,
    StepError,
)
from trio_engine.testing.scripted_executor import ScriptedExecutor
from trio_engine.testing.wire_front_end import WireFrontEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from trio_engine.engine.utility import UtilityHandler


async def run_until_dead(
    executor: ScriptedExecutor,
    fail: Callable[[WireFrontEnd, EngineCoreProc], Awaitable[object]],
    *,
    utilities: Mapping[str, UtilityHandler] = NO_UTILITIES,
    told: Sequence[int] = (0, 1),
    owner_descriptor: int | None = None,
) -> EngineDeadError:
    """Runs an engine with two clients; returns its error when those ``told`` heard of it."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(2, receive_hwm=1) as front_end, trio.open_nursery() as nursery:
            proc = EngineCoreProc(
                CONFIG,
                lambda _: executor,
                handshake_address=front_end.handshake_address,
                utilities=utilities,
                owner_descriptor=owner_descriptor,
            )
            errors: list[EngineDeadError] = []

            async def run() -> None:
                with pytest.raises(EngineDeadError) as caught:
                    await proc.run()
                errors.append(caught.value)

            nursery.start_soon(run)
            await front_end.start_up()
            await front_end.call_utility("is_sleeping")  # READY was said before it serves
            await fail(front_end, proc)
            for client in told:
                await front_end.wait_dead(client)
                await front_end.check_silent(client)
    (error,) = errors
    return error


@pytest.mark.known_fault(kind="wrapped-error")
@pytest.mark.parametrize("call", ["launch", "collect"])
async def test_a_crash_in_a_step_is_told_to_every_client(call: Any) -> None:
    executor = ScriptedExecutor(CONFIG)
    lost = RuntimeError("device lost")
    executor.fail_next(call, lost)
    error = await run_until_dead(executor, lambda front_end, _: front_end.add("x", PROMPT))
    assert "'x'" in str(error)
    assert isinstance(error.__cause__, StepError)
    assert error.__cause__.__cause__ is lost
    assert executor.calls[-1] == "shutdown"


@pytest.mark.known_fault(kind="silent-death")
async def test_a_pending_call_is_not_told_of_a_shutdown_when_it_is_a_crash() -> None:
    """Its caller hears what everybody hears: that the engine has died."""
    executor = ScriptedExecutor(CONFIG)
    executor.fail_next("collect", RuntimeError("device lost"))

    async def fail(front_end: WireFrontEnd, _proc: EngineCoreProc) -> None:
        call_id = await front_end.post_utility("forever")
        await front_end.add("x", PROMPT)
        with trio.move_on_after(TEST_TIMEOUT_S), pytest.raises(EngineDeadError):
            await front_end.wait_answer(call_id)

    await run_until_dead(executor, fail, utilities={"forever": trio.sleep_forever}, told=[1])


async def test_a_failure_that_the_core_does_not_believe_is_a_crash() -> None:
    executor = ScriptedExecutor(CONFIG)
    executor.fail_next("collect", RequestStepError("no such row", slots=[99]))
    error = await run_until_dead(executor, lambda front_end, _: front_end.add("x", PROMPT))
    assert isinstance(error.__cause__, StepError)


@pytest.mark.known_fault(kind="wrapped-error")
@pytest.mark.parametrize("num_failing", [1, 2])
async def test_readers_that_fail_are_one_error(
    num_failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: WireFrontEnd, proc: EngineCoreProc) -> None:
        await wait_all_tasks_blocked()
        for socket in reader_sockets(proc)[:num_failing]:
            socket.close()

    error = await run_until_dead(ScriptedExecutor(CONFIG), fail)
    assert isinstance(error.__cause__, trio.ClosedResourceError)
    assert caplog.text.count("engine_failed ready=True") == num_failing


@pytest.mark.known_fault(kind="wrapped-error")
async def test_a_failure_does_not_hide_behind_a_cancellation() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(2) as front_end:
            proc = EngineCoreProc(
                CONFIG, ScriptedExecutor, handshake_address=front_end.handshake_address
            )
            with pytest.RaisesGroup(EngineDeadError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(proc.run)
                    await front_end.start_up()
                    await front_end.call_utility("is_sleeping")
                    await wait_all_tasks_blocked()
                    reader_sockets(proc)[0].close()
                    nursery.cancel_scope.cancel()


async def read_for_ever(front_end: WireFrontEnd, client: int) -> None:
    while True:
        await front_end.next_outputs(client)


@pytest.mark.known_fault(kind="wrapped-error")
async def test_a_writer_that_fails_ends_the_engine_loudly() -> None:
    """A result that its owner changes after it was given: only the writer can find that."""
    shared: list[object] = []
    was_shared = trio.Event()

    def share() -> list[object]:
        was_shared.set()
        return shared

    async def fail(front_end: WireFrontEnd, _proc: EngineCoreProc) -> None:
        # Answers that fill every buffer on the way to client 0, whose writer then stands.
        for _ in range(50):
            await front_end.post_utility("big", client=0)
        await front_end.post_utility("share", client=0)
        await was_shared.wait()
        await front_end.call_utility("spoil", client=1)
        async with trio.open_nursery() as nursery:
            # What is read of it makes room for the writer; the news never comes by that way.
            nursery.start_soon(read_for_ever, front_end, 0)
            await front_end.wait_dead(1)
            nursery.cancel_scope.cancel()
        await front_end.check_silent(1)

    error = await run_until_dead(
        ScriptedExecutor(CONFIG),
        fail,
        utilities={
            "big": lambda: "x" * 200_000,
            "share": share,
            "spoil": lambda: shared.append(object()),
        },
        told=[],  # ``fail`` heard it
    )
    assert isinstance(error.__cause__, ProtocolError)


class Bug(Exception):
    """One of ours."""


def plant(monkeypatch: pytest.MonkeyPatch, target: object, name: str) -> None:
    """Has a method raise."""

    def fail(*_: object) -> None:
        raise Bug(name)

    monkeypatch.setattr(target, name, fail)


@pytest.mark.known_fault(kind="wrapped-error")
@pytest.mark.parametrize("task", ["step loop", "drain watch", "owner watch"])
async def test_whichever_task_has_a_bug_the_error_is_one_and_every_client_is_told(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()

    async def fail(front_end: WireFrontEnd, proc: EngineCoreProc) -> None:
        assert proc._loop is not None
        if task == "step loop":
            plant(monkeypatch, proc._loop.core, "schedule")
            await front_end.add("x", PROMPT)
        elif task == "drain watch":
            plant(monkeypatch, proc._loop, "start_draining")
            proc.shutdown.request("the test")
        else:
            plant(monkeypatch, proc.shutdown, "lose_owner")
            os.close(write_end)

    with os.fdopen(read_end):
        error = await run_until_dead(ScriptedExecutor(CONFIG), fail, owner_descriptor=read_end)
    if task != "owner watch":
        os.close(write_end)
    assert isinstance(error.__cause__, Bug)


@pytest.mark.known_fault(kind="wrapped-error")
async def test_tasks_of_two_kinds_that_fail_at_once_are_one_error() -> None:
    executor = ScriptedExecutor(CONFIG)
    gate = executor.gates["collect"]

    async def fail(front_end: WireFrontEnd, proc: EngineCoreProc) -> None:
        executor.fail_next("collect", RuntimeError("device lost"))
        gate.close()
        await front_end.add("x", PROMPT)
        await gate.wait_held()
        gate.open()
        reader_sockets(proc)[0].close()

    with executor.gates_open_at_end():
        error = await run_until_dead(executor, fail)
    assert isinstance(error.__cause__, (StepError, trio.ClosedResourceError))


@pytest.mark.known_fault(kind="wrapped-error")
async def test_what_is_raised_while_another_failure_unwinds_does_not_take_its_place() -> None:
    """A task in its ``finally``, and the executor's shutdown."""
    executor = ScriptedExecutor(CONFIG)
    executor.fail_next("shutdown", OSError("device is gone"))
    unwound = False

    async def linger() -> None:
        nonlocal unwound
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
            unwound = True
            raise ValueError("late")

    async def fail(front_end: WireFrontEnd, proc: EngineCoreProc) -> None:
        await front_end.post_utility("linger")
        await front_end.call_utility("is_sleeping")
        reader_sockets(proc)[0].close()

    error = await run_until_dead(executor, fail, utilities={"linger": linger})
    assert isinstance(error.__cause__, trio.ClosedResourceError)
    assert unwound


async def die_after_start() -> None:
    """Runs an engine in a nursery of the caller's, whose step fails."""
    async with open_scripted() as (front_end, _, executor):
        executor.fail_next("collect", RuntimeError("device lost"))
        await front_end.add("x", PROMPT)
        await trio.sleep_forever()


@pytest.mark.known_fault(kind="wrapped-error")
async def test_after_started_the_callers_nursery_wraps_the_one_error_and_nothing_else() -> None:
    with pytest.RaisesGroup(EngineDeadError):
        await die_after_start()


@pytest.mark.known_fault(kind="wrapped-error")
def test_in_a_run_whose_groups_collapse_the_error_is_the_same() -> None:
    with pytest.warns(trio.TrioDeprecationWarning), pytest.raises(EngineDeadError) as caught:
        trio.run(die_after_start, strict_exception_groups=False)
    assert isinstance(caught.value.__cause__, StepError)
