"""An engine that fails after READY: one error for its caller, the news for every client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import (
    CONFIG,
    PROMPT,
    TEST_TIMEOUT_S,
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
) -> EngineDeadError:
    """Runs an engine with two clients; returns its error when those ``told`` heard of it."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(2, receive_hwm=1) as front_end, trio.open_nursery() as nursery:
            proc = EngineCoreProc(
                CONFIG,
                lambda _: executor,
                handshake_address=front_end.handshake_address,
                utilities=utilities,
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


async def test_a_failure_that_the_core_does_not_believe_is_a_crash() -> None:
    executor = ScriptedExecutor(CONFIG)
    executor.fail_next("collect", RequestStepError("no such row", slots=[99]))
    error = await run_until_dead(executor, lambda front_end, _: front_end.add("x", PROMPT))
    assert isinstance(error.__cause__, StepError)


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
        while True:
            with trio.move_on_after(0.5) as scope:
                await front_end.next_outputs(client=0)
            if scope.cancelled_caught:
                break

    error = await run_until_dead(
        ScriptedExecutor(CONFIG),
        fail,
        utilities={
            "big": lambda: "x" * 200_000,
            "share": share,
            "spoil": lambda: shared.append(object()),
        },
        told=[1],
    )
    assert isinstance(error.__cause__, ProtocolError)
