"""Pause and sleep over real sockets, with the executor that finds every stale or lost block.

The fate of each request is the table of ``docs/design/pause-and-sleep.md``. Steps pass a gate, so
that a request is in the middle of its run, with plans in flight, whenever a test wants it there.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import CONFIG, PROMPT, check_nothing_held, open_engine_beside
from trio_engine.engine.step_loop import SHUTTING_DOWN
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason, UtilityOutput, UtilityResult
from trio_engine.testing.scripted_executor import Gate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import StepResult
    from trio_engine.engine.engine_core_proc import EngineCoreProc
    from trio_engine.testing.core_driver import RequestLog
    from trio_engine.testing.wire_front_end import WireFrontEnd

pytestmark = pytest.mark.known_fault(kind="lost-in-sleep")

ABORT, LENGTH = FinishReason.ABORT, FinishReason.LENGTH
MODES = ("abort", "wait", "keep")
NUM_TOKENS = 12
DRAINING = msgspec.structs.replace(CONFIG, shutdown_timeout_s=60.0)


class GatedExecutor(KVCheckingExecutor):
    """Ends each step when the test lets it."""

    def __init__(self, config: EngineConfig, *, launches_ahead: bool = False) -> None:
        super().__init__(config, launches_ahead=launches_ahead)
        self.gate = Gate()

    def collect(self) -> StepResult:
        self.gate.pass_through()
        return super().collect()


class Rig:
    """An engine, its front end, and the gate of its steps."""

    def __init__(self, front_end: WireFrontEnd, proc: EngineCoreProc, gate: Gate) -> None:
        self.front_end = front_end
        self.proc = proc
        self.gate = gate

    async def add(self, request_id: str, num_tokens: int = NUM_TOKENS) -> None:
        await self.front_end.add(request_id, PROMPT, max_tokens=num_tokens)

    async def add_running(self, request_id: str = "R") -> None:
        """Adds a request and stops it in mid-run, some tokens told and plans in flight."""
        self.gate.close()
        await self.add(request_id)
        self.gate.let_pass(4)
        await self.front_end.wait_num_tokens(request_id, 3)
        await self.gate.wait_held()

    async def done(self, method: str, *args: Any) -> None:
        """A call that must be answered by nil."""
        check_done(await self.front_end.call_utility(method, *args))

    async def value(self, method: str, *args: Any) -> Any:
        answer = await self.front_end.call_utility(method, *args)
        assert answer.result is not None, answer.failure_message
        return answer.result.value

    async def finish(self, *request_ids: str) -> None:
        """Each must run to the end that it would have had in an engine of its own."""
        for request_id in request_ids:
            log = await self.front_end.finish(request_id)
            assert (log.token_ids, log.finish_reason) == (self.unpaused_tokens, LENGTH)

    def log(self, request_id: str) -> RequestLog:
        return self.front_end.logs[(0, request_id)]

    async def check_sound(self) -> None:
        """Nothing is left behind, and a fresh request still completes."""
        check_nothing_held(self.proc)
        await self.add("fresh")
        await self.finish("fresh")

    async def learn_unpaused_tokens(self) -> None:
        await self.add("unpaused")
        log = await self.front_end.finish("unpaused")
        self.unpaused_tokens = list(log.token_ids)
        assert len(self.unpaused_tokens) == NUM_TOKENS


def check_done(answer: UtilityOutput) -> None:
    assert answer.failure_message is None
    assert answer.result == UtilityResult(None, None)


@asynccontextmanager
async def open_rig(
    *, launches_ahead: bool = False, config: EngineConfig = CONFIG, ends_by_itself: bool = False
) -> AsyncIterator[Rig]:
    executor = GatedExecutor(config, launches_ahead=launches_ahead)
    async with open_engine_beside(executor, config=config, ends_by_itself=ends_by_itself) as (
        front_end,
        proc,
    ):
        rig = Rig(front_end, proc, executor.gate)
        await rig.learn_unpaused_tokens()
        try:
            yield rig
        finally:
            executor.gate.open()


# The fate of what runs, by mode, in a pause (level 0) and in either depth of sleep


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2])
async def test_abort_mode_ends_what_runs_at_once(level: int, launches_ahead: bool) -> None:
    async with open_rig(launches_ahead=launches_ahead) as rig:
        await rig.add_running()
        call_id = await rig.front_end.post_utility("sleep", level)
        log = await rig.front_end.finish("R")  # the step that runs is not waited for
        assert log.finish_reason is ABORT
        assert log.token_ids == rig.unpaused_tokens[: len(log.token_ids)]
        rig.gate.open()
        check_done(await rig.front_end.wait_answer(call_id))
        await rig.done("wake_up")
        await rig.check_sound()


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2])
async def test_wait_mode_lets_what_runs_finish_before_the_answer(
    level: int, launches_ahead: bool
) -> None:
    async with open_rig(launches_ahead=launches_ahead) as rig:
        await rig.add_running()
        call_id = await rig.front_end.post_utility("sleep", level, "wait")
        await rig.add("S")
        rig.gate.open()
        check_done(await rig.front_end.wait_answer(call_id))
        assert (rig.log("R").token_ids, rig.log("R").finish_reason) == (rig.unpaused_tokens, LENGTH)
        assert rig.log("S").outputs == []
        await rig.done("wake_up")
        await rig.finish("S")
        await rig.check_sound()


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2])
async def test_keep_mode_changes_no_token_of_what_runs(level: int, launches_ahead: bool) -> None:
    async with open_rig(launches_ahead=launches_ahead) as rig:
        await rig.add_running()
        call_id = await rig.front_end.post_utility("sleep", level, "keep")
        await rig.value("is_sleeping")  # the call has come, or R might end before it
        rig.gate.open()
        check_done(await rig.front_end.wait_answer(call_id))
        num_kept = len(rig.log("R").token_ids)
        assert 3 <= num_kept < NUM_TOKENS
        assert rig.log("R").finish_reason is None
        await rig.value("is_sleeping")
        assert len(rig.log("R").token_ids) == num_kept
        await rig.done("wake_up")
        await rig.finish("R")
        await rig.check_sound()


@pytest.mark.parametrize("mode", MODES)
async def test_what_waits_is_aborted_by_abort_mode_and_stays_queued_in_others(mode: str) -> None:
    async with open_rig(config=msgspec.structs.replace(CONFIG, max_num_seqs=1)) as rig:
        await rig.add_running()
        await rig.add("W")
        call_id = await rig.front_end.post_utility("sleep", 1, mode)
        await rig.value("is_sleeping")  # the call has come, or W might run before it
        rig.gate.open()
        check_done(await rig.front_end.wait_answer(call_id))
        if mode == "abort":
            assert rig.log("W").finish_reason is ABORT
        else:
            assert rig.log("W").outputs == []
        await rig.done("wake_up")
        if mode != "abort":
            await rig.finish("W")
        await rig.check_sound()


# What comes meanwhile


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", [1, 2])
async def test_what_comes_in_the_burst_of_a_sleep_or_in_it_runs_after_the_whole_wake_up(
    mode: str, level: int
) -> None:
    async with open_rig() as rig:
        await rig.add_running()
        call_id = await rig.front_end.post_utility("sleep", level, mode)
        await rig.add("S")
        rig.gate.open()
        check_done(await rig.front_end.wait_answer(call_id))
        await rig.done("wake_up", ["weights"])
        await rig.add("T")
        assert await rig.value("is_sleeping") is True
        assert rig.log("S").outputs == rig.log("T").outputs == []
        await rig.done("wake_up")
        assert await rig.value("is_sleeping") is False
        await rig.finish("S", "T")
        if mode == "keep":
            await rig.finish("R")
        await rig.check_sound()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", [0, 1, 2])
async def test_a_sleep_requests_and_the_wake_up_in_one_burst_leave_nobody_behind(
    mode: str, level: int
) -> None:
    """Twice over, and while the step of what runs is held."""
    async with open_rig() as rig:
        await rig.add_running()
        ids = []
        for turn in range(2):
            ids.append(await rig.front_end.post_utility("sleep", level, mode))
            await rig.add(f"S{turn}")
            ids.append(await rig.front_end.post_utility("wake_up", ["weights"]))
            await rig.add(f"T{turn}")
            ids.append(await rig.front_end.post_utility("wake_up"))
        await rig.value("is_sleeping")  # all of it has come, or R might end before it
        rig.gate.open()
        for call_id in ids:
            check_done(await rig.front_end.wait_answer(call_id))
        assert await rig.value("is_sleeping") is False
        if mode == "abort":  # the second sleep found those of the first turn waiting or running
            for request_id in ("R", "S0", "T0"):
                log = await rig.front_end.finish(request_id)
                assert log.finish_reason in (ABORT, LENGTH)
                assert log.token_ids == rig.unpaused_tokens[: len(log.token_ids)]
            assert rig.log("R").finish_reason is ABORT
        else:
            await rig.finish("R", "S0", "T0")
        await rig.finish("S1", "T1")
        await rig.check_sound()


async def test_what_waits_in_a_pause_is_counted_by_the_gauges() -> None:
    async with open_rig() as rig:
        await rig.done("pause_scheduler")
        await rig.add("S")
        # The reset of the caches at the end of a pause is told too, perhaps in a message before.
        counts = (0, 0)
        while counts == (0, 0):
            stats = (await rig.front_end.next_outputs()).scheduler_stats
            if stats is not None:
                counts = (stats.num_running_reqs, stats.num_waiting_reqs)
        assert counts == (0, 1)
        await rig.done("resume_scheduler")
        await rig.finish("S")


async def test_an_abort_in_sleep_ends_the_request_without_an_output() -> None:
    async with open_rig() as rig:
        await rig.add_running()
        call_id = await rig.front_end.post_utility("sleep", 2, "keep")
        await rig.add("S")
        await rig.value("is_sleeping")  # both have come, or R might end before them
        rig.gate.open()
        check_done(await rig.front_end.wait_answer(call_id))
        await rig.front_end.abort("R", "S")
        finished: set[str] = set()
        while finished != {"R", "S"}:
            finished |= (await rig.front_end.next_outputs()).finished_requests or set()
        await rig.done("wake_up")
        assert rig.log("R").finish_reason is None
        assert rig.log("S").outputs == []
        await rig.check_sound()


# Twice, wrongly, and out of turn


async def test_calls_without_an_effect_are_answered_by_nil() -> None:
    async with open_rig() as rig:
        for method, *args in (
            ("wake_up",),
            ("resume_scheduler",),
            ("sleep", 1),
            ("sleep", 1),
            ("pause_scheduler", "keep"),
            ("wake_up",),
            ("wake_up",),
        ):
            await rig.done(str(method), *args)
        assert await rig.value("is_sleeping") is False
        await rig.check_sound()


async def test_a_pause_while_pausing_is_done_with_the_first() -> None:
    async with open_rig() as rig:
        await rig.add_running()
        ids = [await rig.front_end.post_utility("pause_scheduler", mode) for mode in MODES[::-1]]
        await rig.value("is_sleeping")  # they have come, or R might end before them
        rig.gate.open()
        for call_id in ids:
            check_done(await rig.front_end.wait_answer(call_id))
        assert rig.log("R").finish_reason is ABORT  # the newest mode counts
        await rig.done("resume_scheduler")
        await rig.check_sound()


async def test_a_resume_while_memory_sleeps_fails_and_runs_nothing() -> None:
    async with open_rig() as rig:
        await rig.done("sleep", 1)
        await rig.add("S")
        answer = await rig.front_end.call_utility("resume_scheduler")
        assert answer.failure_message == (
            "Call to resume_scheduler method failed: "
            "the engine cannot resume while memory sleeps: kv_cache"
        )
        await rig.done("wake_up", ["scheduling"])
        assert await rig.value("is_sleeping") is True
        assert rig.log("S").outputs == []
        await rig.done("wake_up")
        await rig.finish("S")


# The end


@pytest.mark.parametrize("mode", MODES)
async def test_a_drain_while_paused_lets_everybody_finish(mode: str) -> None:
    async with open_rig(config=DRAINING, ends_by_itself=True) as rig:
        await rig.add_running()
        call_id = await rig.front_end.post_utility("pause_scheduler", mode)
        await rig.add("S")
        rig.gate.open()
        check_done(await rig.front_end.wait_answer(call_id))
        await rig.value("is_sleeping")  # S has come
        rig.proc.shutdown.request("the test")
        await rig.finish("S")
        if mode == "keep":
            await rig.finish("R")
    check_nothing_held(rig.proc)


@pytest.mark.parametrize("level", [1, 2])
async def test_a_drain_while_asleep_gives_everybody_an_end_at_once(level: int) -> None:
    async with open_rig(config=DRAINING, ends_by_itself=True) as rig:
        await rig.add_running()
        call_id = await rig.front_end.post_utility("sleep", level, "keep")
        await rig.add("S")
        await rig.value("is_sleeping")  # both have come, or R might end before them
        rig.gate.open()
        check_done(await rig.front_end.wait_answer(call_id))
        rig.proc.shutdown.request("the test")
        for request_id in ("R", "S"):
            assert (await rig.front_end.finish(request_id)).finish_reason is ABORT
    check_nothing_held(rig.proc)


@pytest.mark.parametrize("method", ["pause_scheduler", "sleep"])
async def test_a_pause_that_comes_during_a_drain_is_refused_and_does_not_hold_it_up(
    method: str,
) -> None:
    async with open_rig(config=DRAINING, ends_by_itself=True) as rig:
        await rig.add_running()
        rig.proc.shutdown.request("the test")
        await wait_all_tasks_blocked()
        args = ["keep"] if method == "pause_scheduler" else [1, "keep"]
        answer = await rig.front_end.call_utility(method, *args)
        assert answer.failure_message == SHUTTING_DOWN
        rig.gate.open()
        await rig.finish("R")


@pytest.mark.parametrize("method", ["pause_scheduler", "sleep"])
async def test_a_drain_ends_a_pause_that_has_not_come_to_rest(method: str) -> None:
    async with open_rig(config=DRAINING, ends_by_itself=True) as rig:
        await rig.add_running()
        args = ["keep"] if method == "pause_scheduler" else [1, "keep"]
        call_id = await rig.front_end.post_utility(method, *args)
        await rig.value("is_sleeping")  # the call has come
        rig.proc.shutdown.request("the test")
        answer = await rig.front_end.wait_answer(call_id)
        assert (answer.failure_message or "").endswith("failed: the engine is shutting down")
        rig.gate.open()
        await rig.finish("R")


async def test_a_stop_without_a_drain_ends_what_sleeps() -> None:
    async with open_rig(ends_by_itself=True) as rig:
        await rig.done("sleep", 2)
        await rig.add("S")
        await rig.value("is_sleeping")
        rig.proc.shutdown.request("the test")
        assert (await rig.front_end.finish("S")).finish_reason is ABORT
