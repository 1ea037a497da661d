"""The thread around an executor: order of calls, what comes back, and how it ends."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import CONFIG, TEST_TIMEOUT_S, make_plan
from trio_engine.core.plan import DeviceCommand, StepResult
from trio_engine.engine.doorbell import ThreadSafeDoorbell
from trio_engine.engine.forward_thread import (
    Broken,
    CommandDone,
    ForwardEvent,
    ForwardThread,
    Loaded,
    StepFailed,
    open_forward_thread,
)
from trio_engine.errors import ModelError, RequestError, RequestStepError
from trio_engine.testing.scripted_executor import ScriptedExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Rig:
    """A thread and the events that come out of it."""

    def __init__(
        self, thread: ForwardThread, executor: ScriptedExecutor, bell: ThreadSafeDoorbell
    ) -> None:
        self.thread = thread
        self.executor = executor
        self._bell = bell

    async def next_event(self) -> ForwardEvent:
        while not self.thread.events:
            await self._bell.wait()
        return self.thread.events.popleft()

    async def next_ids(self, count: int) -> list[int]:
        """Plans of the next results; anything else is an error."""
        ids = []
        for _ in range(count):
            event = await self.next_event()
            assert isinstance(event, StepResult), event
            ids.append(event.plan_id)
        return ids

    async def settle(self) -> None:
        """Returns when everything submitted before has been dealt with."""
        self.thread.submit(DeviceCommand(command_id=99, method="echo"))
        assert await self.next_event() == CommandDone(99, [])


@asynccontextmanager
async def open_rig(
    *, launches_ahead: bool = False, load_error: BaseException | None = None
) -> AsyncIterator[Rig]:
    executor = ScriptedExecutor(CONFIG, launches_ahead=launches_ahead)
    if load_error is not None:
        executor.fail_next("load", load_error)
    with trio.fail_after(TEST_TIMEOUT_S), ThreadSafeDoorbell() as bell:
        async with open_forward_thread(executor, bell.ring) as thread:
            rig = Rig(thread, executor, bell)
            with executor.gates_open_at_end():
                if load_error is None:
                    assert isinstance(await rig.next_event(), Loaded)
                yield rig
    assert executor.calls[0] == "load"
    assert executor.calls.count("shutdown") == 1
    assert executor.calls[-1] == "shutdown"


# Start and end


async def test_it_loads_first_and_shuts_down_last() -> None:
    async with open_rig() as rig:
        assert not rig.thread.is_loading
        assert not rig.thread.launches_ahead
    assert rig.executor.calls == ["load", "shutdown"]


@pytest.mark.parametrize("error", [ModelError("no such model"), SystemExit(3)])
async def test_a_load_that_fails_is_the_only_event(error: BaseException) -> None:
    async with open_rig(load_error=error) as rig:
        assert rig.thread.is_loading
        assert await rig.next_event() == Broken(error)
        assert not rig.thread.is_loading
        rig.thread.submit(make_plan(0, "a", new=True))  # nobody takes it
    assert not rig.thread.events


async def test_a_shutdown_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with open_rig() as rig:
        rig.executor.fail_next("shutdown", OSError("device is gone"))
    assert "executor_shutdown_failed" in caplog.text
    assert "device is gone" in caplog.text


async def test_leaving_waits_for_the_step_and_drops_what_is_queued() -> None:
    executor = ScriptedExecutor(CONFIG)
    gate = executor.gates["collect"]
    gate.close()
    leaving, left = trio.Event(), trio.Event()

    async def use() -> None:
        async with open_forward_thread(executor, bell.ring) as thread:
            thread.submit(make_plan(0, "a", new=True))
            thread.submit(make_plan(1, "a"))
            await gate.wait_held()
            leaving.set()  # no checkpoint from here until the thread was told to stop
        left.set()

    with (
        trio.fail_after(TEST_TIMEOUT_S),
        ThreadSafeDoorbell() as bell,
        executor.gates_open_at_end(),
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(use)
            await leaving.wait()
            await wait_all_tasks_blocked()
            assert not left.is_set()
            gate.open()
    assert executor.calls == ["load", "launch 0", "collect 0", "shutdown"]


@pytest.mark.known_fault(kind="uncancellable-thread")
async def test_cancelling_waits_for_the_step() -> None:
    executor = ScriptedExecutor(CONFIG)
    gate = executor.gates["collect"]
    gate.close()
    left = trio.Event()

    async def use(scope: trio.CancelScope) -> None:
        with scope:
            async with open_forward_thread(executor, bell.ring) as thread:
                thread.submit(make_plan(0, "a", new=True))
                await trio.sleep_forever()
        left.set()

    with (
        trio.fail_after(TEST_TIMEOUT_S),
        ThreadSafeDoorbell() as bell,
        executor.gates_open_at_end(),
    ):
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(use, scope)
            await gate.wait_held()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not left.is_set()
            gate.open()
    assert executor.calls[-1] == "shutdown"


async def test_a_busy_service_does_not_keep_it_from_its_thread() -> None:
    """``to_thread``'s default limiter is the service's; ours must not wait for it."""
    limiter = trio.to_thread.current_default_thread_limiter()
    tokens = limiter.total_tokens
    limiter.total_tokens = 1
    try:
        async with limiter, open_rig():
            pass
    finally:
        limiter.total_tokens = tokens


# The order of plans


async def test_without_launching_ahead_each_plan_is_settled_before_the_next() -> None:
    async with open_rig() as rig:
        for plan_id in range(3):
            rig.thread.submit(make_plan(plan_id, "a", new=plan_id == 0))
        assert await rig.next_ids(3) == [0, 1, 2]
        assert rig.executor.calls[1:] == [
            f"{call} {plan_id}" for plan_id in range(3) for call in ("launch", "collect")
        ]


async def test_launching_ahead_keeps_two_in_the_executor() -> None:
    async with open_rig(launches_ahead=True) as rig:
        for plan_id in range(3):
            rig.thread.submit(make_plan(plan_id, "a", new=plan_id == 0))
        rig.thread.nudge()
        assert await rig.next_ids(3) == [0, 1, 2]
        assert rig.executor.calls[1:] == [
            "launch 0",
            "launch 1",
            "collect 0",
            "launch 2",
            "collect 1",
            "collect 2",
        ]


async def test_a_nudge_with_nothing_launched_means_nothing() -> None:
    async with open_rig(launches_ahead=True) as rig:
        rig.thread.nudge()
        await rig.settle()
        rig.thread.submit(make_plan(0, "a", new=True))
        rig.thread.nudge()
        assert await rig.next_ids(1) == [0]


# Failures


async def expect_failed(rig: Rig, plan_id: int, *slots: int) -> None:
    event = await rig.next_event()
    assert isinstance(event, StepFailed), event
    assert (event.plan_id, event.error.slots) == (plan_id, slots)


async def test_plans_behind_a_failed_one_are_not_run_until_one_starts_anew() -> None:
    async with open_rig() as rig:
        rig.executor.fail_requests("collect", "b")
        rig.thread.submit(make_plan(0, "a", "b", new=True))
        rig.thread.submit(make_plan(1, "a", "b"))
        await expect_failed(rig, 0, 1)
        await rig.settle()
        rig.thread.submit(make_plan(2, "a", reset=True))
        assert await rig.next_ids(1) == [2]
        assert "launch 1" not in rig.executor.calls


async def test_a_failed_launch_counts_as_a_failed_plan() -> None:
    async with open_rig() as rig:
        rig.executor.fail_requests("launch", "b")
        rig.thread.submit(make_plan(0, "a", "b", new=True))
        await expect_failed(rig, 0, 1)
        await rig.settle()
        assert rig.executor.calls[1:] == ["launch 0", "command echo"]


async def test_launched_behind_a_failed_plan_is_collected_and_ignored() -> None:
    async with open_rig(launches_ahead=True) as rig:
        rig.executor.fail_requests("collect", "a")
        rig.thread.submit(make_plan(0, "a", new=True))
        rig.thread.submit(make_plan(1, "a"))
        await expect_failed(rig, 0, 0)
        await rig.settle()
        assert "collect 1" in rig.executor.calls


async def test_two_failures_in_a_row_are_one() -> None:
    async with open_rig(launches_ahead=True) as rig:
        rig.executor.fail_next("collect", RequestStepError("first", slots=[0]))
        rig.executor.fail_next("collect", RequestStepError("second", slots=[0]))
        rig.thread.submit(make_plan(0, "a", new=True))
        rig.thread.submit(make_plan(1, "a"))
        await expect_failed(rig, 0, 0)
        await rig.settle()


async def test_what_was_launched_before_a_failed_launch_settles_first() -> None:
    async with open_rig(launches_ahead=True) as rig:
        rig.thread.submit(make_plan(0, "a", new=True))
        plan = make_plan(1, "a", "b", new=True)
        plan.new_rows = plan.new_rows[1:]
        rig.executor.fail_requests("launch", "b")
        rig.thread.submit(plan)
        assert await rig.next_ids(1) == [0]
        await expect_failed(rig, 1, 1)


async def test_a_failed_launch_behind_a_failed_plan_is_not_worth_a_word() -> None:
    async with open_rig(launches_ahead=True) as rig:
        rig.executor.fail_requests("collect", "a")
        rig.thread.submit(make_plan(0, "a", new=True))
        plan = make_plan(1, "a", "b", new=True)
        plan.new_rows = plan.new_rows[1:]
        rig.executor.fail_requests("launch", "b")
        rig.thread.submit(plan)
        await expect_failed(rig, 0, 0)
        await rig.settle()


@pytest.mark.parametrize("call", ["launch", "collect"])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), SystemExit(1)])
async def test_any_other_error_breaks_the_executor(call: Any, error: BaseException) -> None:
    async with open_rig() as rig:
        rig.executor.fail_next(call, error)
        rig.thread.submit(make_plan(0, "a", new=True))
        assert await rig.next_event() == Broken(error)


# Commands


async def test_commands_are_answered_in_their_place_among_plans() -> None:
    async with open_rig() as rig:
        rig.thread.submit(make_plan(0, "a", new=True))
        rig.thread.submit(DeviceCommand(command_id=5, method="echo", args=(1, "x")))
        assert await rig.next_ids(1) == [0]
        assert await rig.next_event() == CommandDone(5, [1, "x"])


async def test_a_command_that_fails_ends_nothing() -> None:
    async with open_rig() as rig:
        error = ValueError("no")
        rig.executor.fail_next("command", error)
        rig.thread.submit(DeviceCommand(command_id=5, method="echo"))
        rig.thread.submit(DeviceCommand(command_id=6, method="unknown"))
        assert await rig.next_event() == CommandDone(5, error=error)
        event = await rig.next_event()
        assert isinstance(event, CommandDone)
        assert isinstance(event.error, RequestError)
        await rig.settle()


async def test_a_command_is_run_though_plans_are_dropped() -> None:
    async with open_rig() as rig:
        rig.executor.fail_requests("collect", "a")
        rig.thread.submit(make_plan(0, "a", new=True))
        await expect_failed(rig, 0, 0)
        await rig.settle()


async def test_nothing_is_logged_when_all_goes_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "trio_engine")
    async with open_rig():
        pass
    assert caplog.text == ""
