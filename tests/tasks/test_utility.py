"""Utility calls: arguments by type, answers now or later, and always exactly one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.call_parts import CallRig, open_calls
from trio_engine.engine.step_loop import SHUTTING_DOWN
from trio_engine.engine.utility import MAX_CALLS_IN_PROGRESS, UtilityMethod
from trio_engine.errors import RequestError
from trio_engine.outputs import FinishReason, UtilityOutput, UtilityResult
from trio_engine.requests import PauseMode
from trio_engine.wire.messages import AbortRequest

if TYPE_CHECKING:
    from trio.testing import MockClock


# Arguments


def test_arguments_are_converted_by_their_types() -> None:
    def pause(mode: PauseMode = PauseMode.ABORT, clear: bool = True) -> tuple[Any, ...]:
        return mode, clear

    method = UtilityMethod(pause)
    assert method([]) == (PauseMode.ABORT, True)
    assert method(["keep", False]) == (PauseMode.KEEP, False)
    for bad in (["unknown"], ["keep", "yes"], ["keep", True, 3]):
        with pytest.raises(RequestError):
            method(bad)


def test_missing_arguments_are_the_callers_fault() -> None:
    method = UtilityMethod(lambda a, b: (a, b))
    with pytest.raises(RequestError, match="missing a required argument"):
        method([1])


def test_what_has_no_annotation_comes_as_it_was_sent() -> None:
    assert UtilityMethod(lambda a: a)([[1, "x", None]]) == [1, "x", None]


def test_any_callable_will_do() -> None:
    class Handler:
        def __call__(self, count: int) -> int:
            return count + 1

        def method(self, count: int) -> int:
            return count + 2

    def add(count: int, other: int) -> int:
        return count + other

    assert UtilityMethod(Handler())([1]) == 2
    assert UtilityMethod(Handler().method)([1]) == 3
    assert UtilityMethod(functools.partial(add, 3))([1]) == 4
    with pytest.raises(RequestError):
        UtilityMethod(functools.partial(add, 3))(["1"])


# Answers


async def test_an_unknown_method_fails() -> None:
    async with open_calls() as calls:
        for name in ("no_such_method", "__class__", "_turn", ""):
            assert await calls.failure(name) == "this engine has no such method"


async def test_a_users_method_answers_at_once_or_later() -> None:
    release = trio.Event()

    async def later(value: int) -> int:
        await release.wait()
        return value

    async with open_calls(now=lambda value: value, later=later) as calls:
        assert await calls.value("now", 5) == 5
        call_id = calls.post("later", 6)
        assert await calls.value("now", 7) == 7  # not held up
        release.set()
        await wait_all_tasks_blocked()
        (answer,) = calls.answers()
        assert (answer.call_id, answer.result) == (call_id, (None, 6))


async def test_an_awaitable_that_is_no_coroutine_is_awaited() -> None:
    async def finish() -> str:
        await trio.lowlevel.checkpoint()
        return "done"

    class Later:
        def __await__(self) -> Any:
            return finish().__await__()

    async with open_calls(later=Later) as calls:
        assert await calls.value("later") == "done"


async def test_a_users_method_may_replace_a_built_in_one() -> None:
    async with open_calls(is_sleeping=lambda: "never") as calls:
        assert await calls.value("is_sleeping") == "never"


async def test_a_users_method_that_raises_fails_and_nothing_else() -> None:
    def sync() -> None:
        raise KeyError("x")

    async def later() -> None:
        await trio.lowlevel.checkpoint()
        raise RequestError("value 3 is too large")

    async with open_calls(sync=sync, later=later) as calls:
        assert await calls.failure("sync") == "KeyError('x')"
        assert await calls.failure("later") == "value 3 is too large"
        assert await calls.value("is_sleeping") is False


@pytest.mark.parametrize("value", [object(), 1 << 70, {"a": {1j}}, np.float32(1)])
async def test_a_result_without_a_wire_form_is_a_failure(value: object) -> None:
    async def later() -> object:
        await trio.lowlevel.checkpoint()
        return value

    async with open_calls(now=lambda: value, later=later) as calls:
        for method in ("now", "later"):
            assert "cannot encode" in await calls.failure(method)


async def test_arrays_are_a_result() -> None:
    async with open_calls(weights=lambda: np.arange(1000)) as calls:
        assert (await calls.value("weights")).sum() == 499_500


async def test_a_pending_call_is_answered_when_the_engine_stops_and_not_when_it_dies() -> None:
    async with open_calls(forever=trio.sleep_forever) as calls:
        call_id = calls.post("forever")
        await wait_all_tasks_blocked()
        assert calls.answers() == []
        calls.nursery.cancel_scope.cancel()
        await _let_it_end(calls)
        assert calls.answers() == []
        calls.rig.loop.abort_all()
        assert calls.answers() == [UtilityOutput(call_id, failure_message=SHUTTING_DOWN)]


async def test_so_is_one_whose_handler_waits_in_a_nursery_of_its_own() -> None:
    async def forever() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)

    async with open_calls(forever=forever) as calls:
        call_id = calls.post("forever")
        await wait_all_tasks_blocked()
        calls.nursery.cancel_scope.cancel()
        await _let_it_end(calls)
        calls.rig.loop.abort_all()
        assert calls.answers() == [UtilityOutput(call_id, failure_message=SHUTTING_DOWN)]


async def test_calls_that_wait_are_not_without_number() -> None:
    release = trio.Event()
    # One says that it waits, and is not even called; the other does not say so.
    handlers = {"later": release.wait, "unsaid": lambda: release.wait(), "now": lambda: 1}
    async with open_calls(**handlers) as calls:
        for _ in range(MAX_CALLS_IN_PROGRESS):
            calls.post("later")
            await wait_all_tasks_blocked()  # the inbox has room for some lists only
        for method in ("later", "unsaid"):
            assert await calls.failure(method) == "256 calls of this client wait already"
        assert await calls.value("now") == 1  # does not wait
        release.set()
        await wait_all_tasks_blocked()
        assert len(calls.answers()) == MAX_CALLS_IN_PROGRESS
        assert await calls.value("now") == 1


async def test_a_call_that_is_one_too_many_does_nothing() -> None:
    release = trio.Event()
    async with open_calls(later=release.wait) as calls:
        calls.rig.add("x", max_tokens=9)
        for _ in range(MAX_CALLS_IN_PROGRESS):
            calls.post("later")
            await wait_all_tasks_blocked()
        for method in ("pause_scheduler", "sleep", "wake_up", "reset_prefix_cache"):
            assert await calls.failure(method) == "256 calls of this client wait already"
        assert await calls.value("is_sleeping") is False
        release.set()
        await wait_all_tasks_blocked()
        assert len(calls.answers()) == MAX_CALLS_IN_PROGRESS
        await calls.rig.settle_all()
        assert calls.rig.take_ends() == {"x": FinishReason.LENGTH}
        # These go in turn, and wait for none that was refused.
        assert await calls.value("sleep", 0) is None
        assert await calls.value("wake_up") is None


async def _let_it_end(calls: CallRig) -> None:
    with trio.CancelScope(shield=True):
        while calls.nursery.child_tasks:
            await trio.lowlevel.checkpoint()


# The table


async def test_what_front_ends_ask_first() -> None:
    async with open_calls() as calls:
        assert await calls.value("reset_mm_cache") is None
        assert await calls.value("get_supported_tasks") == ["generate"]
        assert await calls.value("reset_encoder_cache") is None


async def test_pause_abort_ends_everything_and_keeps_what_comes() -> None:
    async with open_calls() as calls:
        rig = calls.rig
        rig.add("old", max_tokens=8)
        await wait_all_tasks_blocked()
        call_id = calls.post("pause_scheduler")
        await wait_all_tasks_blocked()
        rig.add("new", max_tokens=1)
        await wait_all_tasks_blocked()
        outputs, answers = rig.take()
        assert [(o.request_id, o.finish_reason) for o in outputs] == [("old", FinishReason.ABORT)]
        assert answers == []  # a plan is still in flight
        await rig.settle(2)
        assert [answer.call_id for answer in calls.answers()] == [call_id]
        assert await calls.value("is_scheduler_paused") is True
        assert await calls.value("is_sleeping") is True
        assert not rig.forward.items
        assert await calls.value("resume_scheduler") is None
        await rig.settle_all()
        assert rig.take_ends() == {"new": FinishReason.LENGTH}


async def test_pause_wait_lets_what_runs_finish_and_answers_then() -> None:
    async with open_calls() as calls:
        rig = calls.rig
        rig.add("a", "b", "c", "d", "queued", max_tokens=3)  # four run at once
        await wait_all_tasks_blocked()
        call_id = calls.post("pause_scheduler", "wait", False)
        await rig.settle(2)
        assert calls.answers() == []
        await rig.settle_all()
        outputs, answers = rig.take()
        assert {o.request_id for o in outputs} == {"a", "b", "c", "d"}
        assert [answer.call_id for answer in answers] == [call_id]
        assert await calls.value("resume_scheduler") is None
        await rig.settle_all()
        assert rig.take_ends() == {"queued": FinishReason.LENGTH}


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_pause_keep_freezes_and_changes_no_token(clear_cache: bool) -> None:
    async with open_calls() as calls:
        rig = calls.rig
        rig.add("x", max_tokens=9)
        await wait_all_tasks_blocked()
        call_id = calls.post("pause_scheduler", "keep", clear_cache)
        await rig.settle(2)
        outputs, answers = rig.take()
        tokens = [token for o in outputs for token in o.new_token_ids]
        assert len(tokens) == 2  # what was in flight is emitted before the answer
        assert [answer.call_id for answer in answers] == [call_id]
        assert bool(rig.core.statistics().num_running_requests) is not clear_cache
        calls.post("resume_scheduler")
        await rig.settle_all()
        tokens += [token for o in rig.take()[0] for token in o.new_token_ids]
        assert tokens == list(range(1006, 1015))


@pytest.mark.parametrize("clear_cache", [True, False])
async def test_a_pause_forgets_cached_blocks_if_it_is_to_clear_the_cache(
    clear_cache: bool,
) -> None:
    async with open_calls() as calls:
        calls.rig.add("x", max_tokens=9)
        await calls.rig.settle_all()
        assert calls.rig.core.statistics().num_cached_blocks > 0
        await calls.value("pause_scheduler", "keep", clear_cache)
        assert bool(calls.rig.core.statistics().num_cached_blocks) is not clear_cache


async def test_pause_of_an_idle_engine_is_done_at_once_and_may_be_repeated() -> None:
    async with open_calls() as calls:
        for mode in ("keep", "keep", "wait", "abort"):
            assert await calls.value("pause_scheduler", mode) is None
        for _ in range(2):
            assert await calls.value("resume_scheduler") is None
        assert "'halt'" in await calls.failure("pause_scheduler", "halt")


async def test_an_abort_works_while_paused() -> None:
    async with open_calls() as calls:
        await calls.value("pause_scheduler")
        calls.rig.add("x")
        calls.rig.come(AbortRequest(["x"]))
        await calls.value("resume_scheduler")
        assert not calls.rig.core.has_requests


async def test_resetting_the_prefix_cache_tells_whether_blocks_are_in_use() -> None:
    async with open_calls() as calls:
        rig = calls.rig
        assert await calls.value("reset_prefix_cache") is True
        rig.add("x", max_tokens=6)
        await wait_all_tasks_blocked()
        calls.post("reset_prefix_cache")
        await wait_all_tasks_blocked()
        await rig.settle(2)
        (answer,) = calls.answers()
        assert answer.result == (None, False)
        calls.post("reset_prefix_cache", True)
        await wait_all_tasks_blocked()
        await rig.settle(2)
        _, (answer,) = rig.take()
        assert answer.result == (None, True)
        assert rig.core.statistics().num_cached_blocks == 0
        await rig.settle_all()
        assert rig.take_ends() == {"x": FinishReason.LENGTH}
        assert rig.core.statistics().num_cached_blocks > 0
        assert await calls.value("reset_prefix_cache") is True
        assert rig.core.statistics().num_cached_blocks == 0


async def test_collective_rpc_gives_one_result_per_worker() -> None:
    async with open_calls() as calls:
        for args, expected in ([("echo",), []], [("echo", None, [1, "x"]), [1, "x"]]):
            call_id = calls.post("collective_rpc", *args)
            await calls.rig.settle_all()
            (answer,) = calls.answers()
            assert (answer.call_id, answer.result) == (call_id, (None, [expected]))


async def test_collective_rpc_fails_as_the_executor_says() -> None:
    async with open_calls() as calls:
        calls.post("collective_rpc", "unknown")
        await calls.rig.settle_all()
        (answer,) = calls.answers()
        assert answer.failure_message is not None
        assert "no method 'unknown'" in answer.failure_message
        assert "kwargs must be empty" in await calls.failure(
            "collective_rpc", "echo", None, [], {"a": 1}
        )


async def test_collective_rpc_that_takes_too_long(autojump_clock: MockClock) -> None:
    async with open_calls() as calls:
        calls.post("collective_rpc", "echo", 2.5)
        await wait_all_tasks_blocked()
        await trio.sleep(3)
        (answer,) = calls.answers()
        assert answer.failure_message is not None
        assert "2.5 s" in answer.failure_message
        calls.rig.forward.settle()  # its late answer is dropped
        assert await calls.value("is_sleeping") is False


async def test_collective_rpc_cannot_put_the_executor_to_sleep_behind_the_engines_back() -> None:
    async with open_calls() as calls:
        for method in ("sleep", "wake_up"):
            reason = await calls.failure("collective_rpc", method, None, [["kv_cache"]])
            assert reason == f"{method} is a method of the engine: call that"


async def test_a_dummy_batch_is_the_executors_to_compute() -> None:
    async with open_calls() as calls:
        calls.rig.executor.commands["execute_dummy_batch"] = lambda: None
        call_id = calls.post("execute_dummy_batch")
        await calls.rig.settle_all()
        assert calls.answers() == [UtilityOutput(call_id, result=UtilityResult(None, None))]
        assert "command execute_dummy_batch" in calls.rig.executor.calls


async def test_what_means_nothing_to_this_engine_is_told_as_it_is() -> None:
    async with open_calls() as calls:
        for method, args, reason in (
            ("profile", [True, None], "this engine has no profiler"),
            ("profile", [], "this engine has no profiler"),
            (
                "save_sharded_state",
                ["/x", None, None],
                "this engine has no sharded state: its model runs on one device",
            ),
            (
                "reinitialize_distributed",
                [{"new_data_parallel_size": 2}],
                "this engine does no elastic expert parallelism",
            ),
            (
                "eep_handle_engine_core_notification",
                ["RECONFIGURE_FINISHED"],
                "this engine does no elastic expert parallelism",
            ),
        ):
            assert await calls.failure(method, *args) == reason
