"""Pause, sleep and wake-up calls against each other: order, failures, what takes effect when.

Commands and plans settle by hand, so each call can be met in the middle of any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.call_parts import CallRig, open_calls
from trio_engine.core.plan import DeviceCommand
from trio_engine.errors import RequestError
from trio_engine.outputs import FinishReason
from trio_engine.requests import PauseMode, SleepTag

if TYPE_CHECKING:
    from trio.testing import MockClock

pytestmark = pytest.mark.known_fault(kind="lost-in-sleep")

LENGTH = FinishReason.LENGTH
RESUMED = "the engine was resumed before it had come to rest"


class SleepRig:
    """Calls, an executor that knows how to sleep, and what it was told."""

    def __init__(self, calls: CallRig) -> None:
        self.calls = calls
        self.rig = calls.rig
        self.state = calls.rig.core.pause_state
        self.commands: list[tuple[str, list[str]]] = []
        for method in ("sleep", "wake_up"):
            self.rig.executor.commands[method] = self._note(method)

    def _note(self, method: str) -> Any:
        return lambda tags: self.commands.append((method, list(tags)))

    async def done(self, method: str, *args: Any) -> None:
        """A call that is answered by nil once everything in the queue has run."""
        call_id = self.calls.post(method, *args)
        await self.rig.settle_all()
        assert self.results() == {call_id: None}

    def results(self) -> dict[int, Any]:
        """Answers since the last call: by id None, or the failure's reason."""
        found: dict[int, Any] = {}
        for answer in self.calls.answers():
            text = answer.failure_message
            assert text is not None or answer.result == (None, None)
            found[answer.call_id] = text and text.partition("failed: ")[2]
        return found


# Levels and tags


@pytest.mark.parametrize(
    ("level", "tags"), [(0, []), (1, ["kv_cache"]), (2, ["kv_cache", "weights"])]
)
async def test_each_level_gives_back_its_memory_and_wake_up_takes_it_again(
    level: int, tags: list[str]
) -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", level)
        assert await calls.value("is_sleeping") is True
        assert await calls.value("is_scheduler_paused") is True
        await sleep.done("wake_up")
        assert sleep.commands == ([("sleep", tags), ("wake_up", tags)] if tags else [])
        assert await calls.value("is_sleeping") is False


async def test_the_default_is_level_1_by_abort() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        calls.rig.add("x")
        await sleep.done("sleep")
        assert sleep.state.asleep == {SleepTag.KV_CACHE}
        assert sleep.state.mode is PauseMode.ABORT


async def test_calls_with_nothing_left_to_do_are_done() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        for call in (
            ("wake_up",),
            ("resume_scheduler",),
            ("sleep", 1),
            ("sleep", 1, "keep"),
            ("sleep", 0),
            ("pause_scheduler", "wait"),
            ("wake_up", ["weights"]),
            ("wake_up", []),
        ):
            await sleep.done(*call)
        assert sleep.commands == [("sleep", ["kv_cache"])]
        for _ in range(2):
            await sleep.done("wake_up")
        assert sleep.commands[1:] == [("wake_up", ["kv_cache"])]


async def test_a_deeper_sleep_gives_back_the_rest_and_a_lighter_one_takes_nothing_again() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        for level in (1, 2, 1):
            await sleep.done("sleep", level)
        assert sleep.commands == [("sleep", ["kv_cache"]), ("sleep", ["weights"])]
        assert sleep.state.asleep == {SleepTag.KV_CACHE, SleepTag.WEIGHTS}


async def test_what_was_woken_in_part_falls_asleep_again() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", 2)
        await sleep.done("wake_up", ["weights"])
        await sleep.done("sleep", 2)
        assert sleep.commands[-1] == ("sleep", ["weights"])


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
async def test_it_resumes_with_the_last_of_the_memory(first: str) -> None:
    (second,) = {"weights", "kv_cache"} - {first}
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", 2)
        calls.rig.add("x", max_tokens=1)
        await sleep.done("wake_up", [first, "scheduling"])
        assert await calls.value("is_sleeping") is True
        await sleep.done("wake_up", [second])
        assert calls.rig.core.statistics().num_steps == 1
        assert not calls.rig.core.has_requests


async def test_scheduling_alone_ends_a_pause_and_wakes_no_memory() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", 0)
        await sleep.done("wake_up", ["scheduling"])
        assert await calls.value("is_sleeping") is False
        await sleep.done("sleep", 2)
        await sleep.done("wake_up", ["scheduling"])
        assert await calls.value("is_sleeping") is True
        assert sleep.commands == [("sleep", ["kv_cache", "weights"])]


async def test_a_resume_is_refused_while_memory_sleeps() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", 2)
        for awake, left in (("weights", "kv_cache, weights"), ("kv_cache", "kv_cache")):
            assert await calls.failure("resume_scheduler") == (
                f"the engine cannot resume while memory sleeps: {left}"
            )
            await sleep.done("wake_up", [awake])
        assert await calls.value("is_sleeping") is False


@pytest.mark.parametrize(
    ("method", "args", "named"),
    [
        ("sleep", [3], "3"),
        ("sleep", [-1], "-1"),
        ("sleep", ["1"], "int"),
        ("sleep", [1, "halt"], "'halt'"),
        ("pause_scheduler", ["halt"], "'halt'"),
        ("wake_up", [["memory"]], "'memory'"),
        ("wake_up", ["weights"], "array"),
    ],
)
async def test_an_unknown_level_mode_or_tag_changes_nothing(
    method: str, args: list[Any], named: str
) -> None:
    async with open_calls() as calls:
        assert named in await calls.failure(method, *args)
        assert await calls.value("is_sleeping") is False


# Against each other


async def test_a_sleep_and_a_wake_up_in_one_burst_take_effect_in_turn() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        calls.rig.add("x", max_tokens=4)
        await wait_all_tasks_blocked()
        ids = [calls.post("sleep", level, "keep") for level in (1, 0, 2)]
        ids.append(calls.post("wake_up"))
        await calls.rig.settle_all()
        assert list(sleep.results()) == ids
        assert [method for method, _ in sleep.commands] == ["sleep", "sleep", "wake_up"]
        assert await calls.value("is_sleeping") is False
        assert not calls.rig.core.has_requests


async def test_a_wake_up_and_a_sleep_in_one_burst_leave_it_asleep() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", 1)
        calls.post("wake_up")
        calls.post("sleep", 1)
        calls.rig.add("x", max_tokens=1)
        await calls.rig.settle_all()
        assert set(sleep.results().values()) == {None}
        assert [method for method, _ in sleep.commands] == ["sleep", "wake_up", "sleep"]
        assert await calls.value("is_sleeping") is True
        await sleep.done("wake_up")
        assert not calls.rig.core.has_requests


async def test_a_pause_that_comes_during_a_wake_up_outlasts_it() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", 1)
        calls.post("wake_up")
        await wait_all_tasks_blocked()
        assert isinstance(calls.rig.forward.items[0], DeviceCommand)
        calls.post("pause_scheduler", "keep")
        await calls.rig.settle_all()
        assert list(sleep.results().values()) == [None, None]
        assert not sleep.state.asleep
        assert await calls.value("is_scheduler_paused") is True


async def test_a_resume_ends_a_pause_and_a_sleep_that_have_not_come_to_rest() -> None:
    """Else the sleep would come over an engine that is wanted, whenever that is idle."""
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        calls.rig.add("x", max_tokens=4)
        await wait_all_tasks_blocked()
        pending = [calls.post("pause_scheduler", "wait"), calls.post("sleep", 2, "wait")]
        await calls.rig.settle()
        resumed = calls.post("resume_scheduler")
        await wait_all_tasks_blocked()
        assert sleep.results() == dict.fromkeys(pending, RESUMED) | {resumed: None}
        await calls.rig.settle_all()
        assert calls.rig.take_ends() == {"x": LENGTH}
        assert sleep.commands == []


async def test_a_resume_in_the_burst_of_a_pause_and_a_sleep_ends_both() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        core = calls.rig.core
        pending = [calls.post("pause_scheduler", "keep"), calls.post("sleep", 1, "keep")]
        calls.post("resume_scheduler")
        calls.rig.add("x", max_tokens=2)
        await calls.rig.settle_all()
        results = sleep.results()
        assert [results[call_id] for call_id in pending] == [RESUMED, RESUMED]
        assert not core.pause_state.is_on
        assert sleep.commands == []


async def test_calls_behind_a_sleep_that_was_ended_go_on() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        calls.rig.add("x", max_tokens=4)
        await wait_all_tasks_blocked()
        calls.post("sleep", 1, "wait")
        second = calls.post("sleep", 1, "wait")
        calls.post("resume_scheduler")
        third = calls.post("sleep", 1, "keep")
        await calls.rig.settle_all()
        results = sleep.results()
        assert results[second] == RESUMED
        assert results[third] is None
        assert sleep.state.asleep == {SleepTag.KV_CACHE}
        await sleep.done("wake_up")
        assert not calls.rig.core.has_requests


# Executors that cannot


async def test_an_executor_that_cannot_sleep_leaves_the_engine_paused_and_whole() -> None:
    async with open_calls() as calls:
        call_id = calls.post("sleep", 2)
        await calls.rig.settle_all()
        (answer,) = calls.answers()
        assert answer.call_id == call_id
        assert "no method 'sleep'" in (answer.failure_message or "")
        assert not calls.rig.core.pause_state.asleep
        assert await calls.value("is_scheduler_paused") is True
        assert await calls.value("resume_scheduler") is None


async def test_a_wake_up_that_fails_may_be_tried_again() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", 2)
        calls.rig.add("x", max_tokens=1)
        calls.rig.executor.fail_next("command", RequestError("the checkpoint is gone"))
        call_id = calls.post("wake_up")
        await calls.rig.settle_all()
        assert sleep.results() == {call_id: "the checkpoint is gone"}
        assert await calls.value("is_sleeping") is True
        await sleep.done("wake_up")
        assert not calls.rig.core.has_requests


# Ends


async def test_a_drain_ends_a_sleep_that_has_not_come_to_rest() -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        calls.rig.add("x", max_tokens=6)
        await wait_all_tasks_blocked()
        call_id = calls.post("sleep", 1, "wait")
        await calls.rig.settle()
        calls.rig.loop.start_draining()
        await wait_all_tasks_blocked()
        assert sleep.results() == {call_id: "the engine is shutting down"}
        await calls.rig.settle_all()
        assert calls.rig.take_ends() == {"x": LENGTH}


async def test_asleep_it_does_not_spin(autojump_clock: MockClock) -> None:
    async with open_calls() as calls:
        sleep = SleepRig(calls)
        await sleep.done("sleep", 1)
        calls.rig.add("x", "y")
        await trio.sleep(3600)
        await wait_all_tasks_blocked()
        assert calls.rig.core.statistics().num_steps == 0
