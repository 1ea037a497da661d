"""The loop's turns, one at a time. No threads: time may jump. One object, so one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import CONFIG, TEST_TIMEOUT_S
from tests.tasks.loop_parts import LoopRig, open_loop
from trio_engine.core.engine_core import LEAST_AMPLE_BACKLOG
from trio_engine.core.plan import DeviceCommand, StepPlan
from trio_engine.engine.forward_thread import Broken, Loaded
from trio_engine.engine.step_loop import SHUTTING_DOWN
from trio_engine.errors import RequestError, RequestStepError, StepError, UtilityError
from trio_engine.executor.null import null_token
from trio_engine.outputs import FinishReason, UtilityOutput
from trio_engine.requests import PauseMode
from trio_engine.testing.requests import make_request
from trio_engine.wire.codec import UndecodableRequest
from trio_engine.wire.messages import AbortRequest, StartDPWave, UtilityCall

if TYPE_CHECKING:
    from trio.testing import MockClock

CALL = UtilityCall(0, 7, "is_sleeping", [])
ABORTED = FinishReason.ABORT
LENGTH = FinishReason.LENGTH


# The pipeline


async def test_a_request_runs_to_its_end() -> None:
    async with open_loop() as rig:
        rig.add("x", max_tokens=3)
        await rig.settle_all()
        outputs, _ = rig.take()
        (output,) = outputs  # merged: nobody took one before
        assert output.new_token_ids == [null_token([1, 2, 3], i) for i in range(3)]
        assert output.finish_reason is LENGTH
        assert set(rig.rung) == {0}


@pytest.mark.parametrize("depth", [1, 2])
async def test_no_more_plans_are_in_flight_than_the_pipeline_is_deep(depth: int) -> None:
    config = msgspec.structs.replace(CONFIG, pipeline_depth=depth)
    async with open_loop(config) as rig:
        rig.add("x", max_tokens=5)
        await wait_all_tasks_blocked()
        for _ in range(3):
            assert rig.core.num_plans_in_flight == len(rig.forward.items) == depth
            await rig.settle()


NEARLY_BACKED_UP = [str(number) for number in range(CONFIG.max_num_seqs + LEAST_AMPLE_BACKLOG)]
"""As many requests as may run, and so many behind them that one more is a backlog."""


async def test_it_is_backed_up_while_many_wait_behind_those_that_run() -> None:
    async with open_loop() as rig:
        rig.add(*NEARLY_BACKED_UP, max_tokens=1)
        await wait_all_tasks_blocked()
        assert not rig.loop.is_backed_up()
        rig.add("x", max_tokens=1)
        await wait_all_tasks_blocked()
        assert rig.loop.is_backed_up()
        await rig.settle()
        assert not rig.loop.is_backed_up()
        await rig.settle_all()


async def test_that_a_whole_batch_waits_is_less_than_a_backlog() -> None:
    num_slots = 2 * LEAST_AMPLE_BACKLOG
    config = msgspec.structs.replace(CONFIG, max_num_seqs=num_slots, num_blocks=2 * num_slots)
    async with open_loop(config) as rig:
        rig.add(*(str(number) for number in range(2 * num_slots)), max_tokens=1)
        await wait_all_tasks_blocked()
        assert not rig.loop.is_backed_up()
        rig.add("x", max_tokens=1)
        await wait_all_tasks_blocked()
        assert rig.loop.is_backed_up()


@pytest.mark.parametrize("depth", [1, 2])
async def test_it_is_not_backed_up_while_draining(depth: int) -> None:
    """What comes then does not wait but is refused, and must be read before the end."""
    config = msgspec.structs.replace(CONFIG, pipeline_depth=depth)
    async with open_loop(config) as rig:
        rig.add(*NEARLY_BACKED_UP, "x")
        await wait_all_tasks_blocked()
        assert rig.loop.is_backed_up()
        rig.loop.start_draining()
        await wait_all_tasks_blocked()
        assert rig.core.is_backed_up
        assert not rig.loop.is_backed_up()


async def test_where_nothing_runs_it_is_not_backed_up() -> None:
    async with open_loop() as rig:
        rig.core.pause(PauseMode.KEEP)
        rig.add(*NEARLY_BACKED_UP, "x")
        await wait_all_tasks_blocked()
        assert rig.core.is_backed_up
        assert not rig.loop.is_backed_up()


async def test_an_idle_and_a_paused_loop_do_not_spin(autojump_clock: MockClock) -> None:
    async with open_loop() as rig:
        await wait_all_tasks_blocked()
        rig.core.pause(PauseMode.KEEP)
        rig.add("x")
        # A task that never rests would keep this from returning, and the clock from jumping.
        await trio.sleep(3600)
        await wait_all_tasks_blocked()
        assert rig.core.statistics().num_steps == 0


async def test_an_executor_that_launches_ahead_is_told_when_no_plan_follows() -> None:
    async with open_loop(launches_ahead=True) as rig:
        rig.add("x", max_tokens=3)
        await wait_all_tasks_blocked()
        assert (len(rig.forward.items), rig.forward.num_nudges) == (2, 0)
        await rig.settle()  # the third and last is planned
        assert rig.forward.num_nudges == 0
        await rig.settle()
        assert rig.forward.num_nudges == 1
        rig.come(AbortRequest(["nobody"]))  # a turn without a new plan: once is enough
        await wait_all_tasks_blocked()
        assert rig.forward.num_nudges == 1


async def test_a_failed_step_ends_its_requests_and_plans_the_others_again() -> None:
    async with open_loop() as rig:
        rig.executor.fail_requests("collect", "bad")
        rig.add("good", "bad", max_tokens=2)
        await rig.settle_all()
        assert rig.take_ends() == {"good": LENGTH, "bad": FinishReason.ERROR}


async def test_a_broken_executor_ends_the_loop_and_names_what_ran() -> None:
    with pytest.RaisesGroup(StepError) as caught:
        async with open_loop() as rig:
            rig.add("x")
            await wait_all_tasks_blocked()
            lost = RuntimeError("device lost")
            rig.forward.come(Broken(lost))
            await trio.sleep_forever()
    (error,) = caught.value.exceptions
    assert "'x'" in str(error)
    assert error.__cause__ is lost


async def test_loading_twice_is_a_bug_of_ours() -> None:
    with pytest.RaisesGroup(AssertionError):
        async with open_loop() as rig:
            rig.forward.come(Loaded(rig.executor.load()))
            await trio.sleep_forever()


# Messages


@pytest.mark.known_fault(kind="late-abort")
async def test_messages_count_in_the_order_in_which_they_came() -> None:
    """ADD, ABORT and ADD of one id in one burst: the abort must not hit the second."""
    async with open_loop() as rig:
        request = make_request("x", [1], max_tokens=1)
        rig.come(request, AbortRequest(["x"]), request)
        await rig.settle_all()
        outputs, _ = rig.take()
        assert [(o.request_id, o.finish_reason) for o in outputs] == [("x", LENGTH)]


@pytest.mark.known_fault(kind="abort-during-a-step")
@pytest.mark.parametrize("moment", ["before", "in flight", "settled"])
async def test_an_aborted_request_yields_nothing(moment: str) -> None:
    async with open_loop() as rig:
        rig.add("x", "y", max_tokens=4)
        if moment != "before":
            await wait_all_tasks_blocked()
        if moment == "settled":
            rig.forward.settle()  # the result is there, but the loop has not seen it
        rig.come(AbortRequest(["x", "x", "unknown"]))
        await rig.settle_all()
        assert rig.take_ends() == {"y": LENGTH}
        assert rig.core.statistics().num_free_blocks == rig.core.statistics().num_blocks


async def test_a_client_cannot_abort_for_another() -> None:
    async with open_loop() as rig:
        rig.add("x", max_tokens=1)
        rig.add("x", client=1, max_tokens=1)
        rig.come(AbortRequest(["x"]), client=1)
        await rig.settle_all()
        assert rig.take_ends(0) == {"x": LENGTH}
        assert rig.take_ends(1) == {}


async def test_aborting_thousands_at_once_leaves_nothing() -> None:
    async with open_loop() as rig:
        ids = [str(i) for i in range(5000)]
        rig.add(*ids)
        await wait_all_tasks_blocked()
        rig.come(AbortRequest(ids))
        await rig.settle_all()
        assert not rig.core.has_requests
        assert rig.take_ends() == {}


async def test_what_means_nothing_here_is_dropped_with_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_loop() as rig:
        rig.come(StartDPWave(1), UtilityCall(9, 1, "is_sleeping", []))
        rig.come(UndecodableRequest("rubbish"))
        await wait_all_tasks_blocked()
        assert "message_dropped kind=StartDPWave" in caplog.text
        assert "call_dropped method='is_sleeping' client=9" in caplog.text
        assert "message_undecodable client=0 reason='rubbish'" in caplog.text
        assert rig.take() == ([], [])


async def test_an_undecodable_message_is_answered_to_whom_it_names() -> None:
    async with open_loop() as rig:
        rig.come(UndecodableRequest("bad", request_id="x"), client=1)
        rig.come(UndecodableRequest("bad call", call_id=3), client=1)
        await wait_all_tasks_blocked()
        outputs, answers = rig.take(1)
        assert [(o.request_id, o.finish_reason) for o in outputs] == [("x", FinishReason.ERROR)]
        assert answers == [UtilityOutput(3, failure_message="Call failed: bad call")]
        assert rig.take(0) == ([], [])


async def test_a_bad_message_under_a_live_id_does_not_end_it() -> None:
    async with open_loop() as rig:
        rig.add("x", max_tokens=1)
        rig.come(UndecodableRequest("bad", request_id="x"))
        await rig.settle_all()
        assert rig.take_ends() == {"x": LENGTH}


# The end


async def test_a_drain_ends_with_the_last_request_and_not_later() -> None:
    """No plan is behind the last one, so nothing else would wake the loop."""
    rig = LoopRig(CONFIG, num_clients=1, launches_ahead=False)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.loop.run)
            rig.add("x", max_tokens=2)
            await wait_all_tasks_blocked()
            rig.loop.start_draining()
            await rig.settle_all()
    assert rig.take_ends() == {"x": LENGTH}


async def test_a_drain_ends_when_the_last_request_is_aborted() -> None:
    rig = LoopRig(CONFIG, num_clients=1, launches_ahead=False)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.loop.run)
            rig.add("x")
            await wait_all_tasks_blocked()
            rig.loop.start_draining()
            rig.come(AbortRequest(["x"]))


async def test_a_drain_without_requests_ends_at_once() -> None:
    rig = LoopRig(CONFIG, num_clients=1, launches_ahead=False)
    rig.loop.start_draining()
    with trio.fail_after(TEST_TIMEOUT_S):
        await rig.loop.run()


async def test_while_draining_new_work_is_refused() -> None:
    async with open_loop() as rig:
        rig.loop.start_utility_call = _never
        rig.add("old", max_tokens=2)
        await wait_all_tasks_blocked()
        rig.loop.start_draining()
        rig.add("new")
        rig.come(CALL)
        await wait_all_tasks_blocked()
        outputs, answers = rig.take()
        assert [(o.request_id, o.finish_reason) for o in outputs] == [("new", ABORTED)]
        assert answers == [UtilityOutput(7, failure_message=SHUTTING_DOWN)]
        await rig.settle_all()
        assert rig.take_ends() == {"old": LENGTH}


async def test_a_drain_ends_a_pause() -> None:
    rig = LoopRig(CONFIG, num_clients=1, launches_ahead=False)
    rig.core.pause(PauseMode.KEEP)
    rig.add("x", max_tokens=1)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.loop.run)
            await wait_all_tasks_blocked()
            assert not rig.forward.items
            rig.loop.start_draining()
            await rig.settle_all()
    assert rig.take_ends() == {"x": LENGTH}


async def test_aborting_all_takes_what_is_still_in_the_inbox(autojump_clock: MockClock) -> None:
    rig = LoopRig(CONFIG, num_clients=2, launches_ahead=False)
    rig.loop.start_utility_call = _never
    rig.add("running", client=1)
    with trio.move_on_after(1):
        await rig.loop.run()
    rig.add("unread")
    rig.come(CALL)
    rig.rung.clear()
    rig.loop.abort_all()
    outputs, answers = rig.take()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("unread", ABORTED)]
    assert answers == [UtilityOutput(7, failure_message=SHUTTING_DOWN)]
    assert rig.take_ends(1) == {"running": ABORTED}
    assert set(rig.rung) == {0, 1}
    rig.loop.abort_all()  # again: nothing is told twice
    assert rig.take() == ([], [])


async def test_after_the_end_what_still_comes_is_refused() -> None:
    rig = LoopRig(CONFIG, num_clients=1, launches_ahead=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.loop.refuse_all)
        await wait_all_tasks_blocked()
        for request_id in ("x", "y"):
            rig.add(request_id)
            await wait_all_tasks_blocked()
            assert rig.take_ends() == {request_id: ABORTED}
        nursery.cancel_scope.cancel()


# Utility calls' tools


async def test_without_a_table_of_calls_they_are_refused() -> None:
    async with open_loop() as rig:
        rig.come(CALL)
        await wait_all_tasks_blocked()
        assert rig.take()[1] == [UtilityOutput(7, failure_message=SHUTTING_DOWN)]


async def test_planning_stops_and_goes_on() -> None:
    async with open_loop() as rig:
        rig.add("x", max_tokens=4)
        await wait_all_tasks_blocked()
        inside = trio.Event()
        leave = trio.Event()

        async def hold() -> None:
            async with rig.loop.planning_stopped():
                inside.set()
                await leave.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await wait_all_tasks_blocked()
            await rig.settle()
            assert not inside.is_set()
            assert len(rig.forward.items) == 1
            await rig.settle()
            assert inside.is_set()
            assert not rig.forward.items
            leave.set()
            await wait_all_tasks_blocked()
            assert len(rig.forward.items) == 2
        await rig.settle_all()
        assert rig.take_ends() == {"x": LENGTH}


async def test_cancelling_who_stopped_planning_lets_it_go_on(autojump_clock: MockClock) -> None:
    async with open_loop() as rig:
        rig.add("x", max_tokens=4)
        await wait_all_tasks_blocked()
        with trio.move_on_after(1):
            async with rig.loop.planning_stopped():
                raise AssertionError("plans are in flight")
        await rig.settle_all()
        assert rig.take_ends() == {"x": LENGTH}


async def test_a_pause_comes_to_rest_when_what_is_in_flight_has_settled() -> None:
    async with open_loop() as rig:
        rig.add("x", max_tokens=8)
        await wait_all_tasks_blocked()
        number = rig.core.pause(PauseMode.KEEP)
        done = trio.Event()

        async def wait() -> None:
            await rig.loop.wait_paused(number)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            await rig.settle()
            assert not done.is_set()
            await rig.settle()
            assert done.is_set()


async def test_who_waits_for_a_pause_hears_at_once_that_it_was_ended() -> None:
    """With plans in flight all the time: there may never be a moment without."""
    async with open_loop() as rig:
        rig.add("x", max_tokens=8)
        await wait_all_tasks_blocked()
        number = rig.core.pause(PauseMode.WAIT)
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(UtilityError, match="resumed before"):
                    await rig.loop.wait_paused(number)

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            rig.core.resume()
            rig.loop.ring()
        assert rig.core.num_plans_in_flight == 2


async def settle_command(rig: LoopRig) -> None:
    await wait_all_tasks_blocked()
    assert isinstance(rig.forward.items[0], DeviceCommand)
    await rig.settle()


async def test_a_command_runs_between_plans() -> None:
    async with open_loop() as rig:
        rig.add("x", max_tokens=8)
        await wait_all_tasks_blocked()
        results: list[object] = []

        async def run() -> None:
            results.append(await rig.loop.run_command("echo", 1, 2))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            await rig.settle(2)
            await settle_command(rig)
        assert results == [[1, 2]]
        await wait_all_tasks_blocked()
        assert all(isinstance(item, StepPlan) for item in rig.forward.items)


async def test_a_command_that_fails_raises_what_the_executor_raised() -> None:
    async with open_loop() as rig, trio.open_nursery() as nursery:
        nursery.start_soon(settle_command, rig)
        with pytest.raises(RequestError, match="no method 'unknown'"):
            await rig.loop.run_command("unknown")


async def test_the_answer_to_a_cancelled_command_is_dropped(autojump_clock: MockClock) -> None:
    async with open_loop() as rig:
        with trio.move_on_after(1):
            await rig.loop.run_command("echo")
        await settle_command(rig)
        rig.add("x", max_tokens=1)
        await rig.settle_all()
        assert rig.take_ends() == {"x": LENGTH}


def _never(call: UtilityCall) -> None:
    raise AssertionError(f"{call} was started")


async def test_a_failure_of_rows_that_were_not_planned_is_not_believed() -> None:
    with pytest.RaisesGroup(StepError):
        async with open_loop() as rig:
            rig.executor.fail_next("collect", RequestStepError("no such slot", slots=[99]))
            rig.add("x")
            await wait_all_tasks_blocked()
            rig.forward.settle()
            await trio.sleep_forever()
