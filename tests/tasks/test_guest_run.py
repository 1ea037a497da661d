"""A Trio run driven by calls: it stands still between them, and no thread is behind it."""

from __future__ import annotations

import threading

import pytest
import trio

from trio_engine.testing.guest_run import GuestRun


async def nothing() -> None:
    pass


def test_tasks_go_as_far_as_they_get_and_no_further() -> None:
    log: list[str] = []

    async def main() -> None:
        log.append("started")
        await trio.sleep(5)
        log.append("slept")
        await trio.sleep_forever()

    guest = GuestRun(main)
    guest.settle()
    assert log == ["started"]
    guest.jump(4)
    assert log == ["started"]
    guest.jump(2)
    assert log == ["started", "slept"]
    guest.close()


def test_a_call_returns_what_the_function_returns_when_all_is_quiet() -> None:
    guest = GuestRun(trio.sleep_forever)
    done: list[str] = []

    async def work() -> None:
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        done.append("work")

    async def start() -> str:
        trio.lowlevel.spawn_system_task(work)
        return "started"

    assert guest.call(start) == "started"
    assert done == ["work"]
    assert guest.call(len, "abc") == 3
    guest.close()


def test_an_error_of_the_function_is_raised_and_the_run_goes_on() -> None:
    async def fail() -> None:
        raise KeyError("x")

    guest = GuestRun(trio.sleep_forever)
    with pytest.raises(KeyError):
        guest.call(fail)
    assert guest.call(len, "") == 0
    guest.close()


def test_no_thread_waits_for_input() -> None:
    before = set(threading.enumerate())
    guest = GuestRun(trio.sleep_forever)
    guest.settle()
    assert set(threading.enumerate()) <= before  # an idle one of another test may end meanwhile
    guest.close()


def test_close_lets_clean_up_wait_for_its_deadlines() -> None:
    log: list[float] = []

    async def main() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(100)
            log.append(trio.current_time())

    guest = GuestRun(main)
    guest.settle()
    guest.close()
    assert log == [100.0]


def test_the_main_tasks_error_is_raised_at_the_end() -> None:
    async def main() -> None:
        raise KeyError("x")

    guest = GuestRun(main)
    with pytest.raises(AssertionError, match="the run has ended"):
        guest.settle()
    with pytest.raises(KeyError):
        guest.close()


def test_tasks_that_spin_are_noticed_and_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_engine.testing.guest_run.MAX_TICKS", 500)

    async def spin() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    guest = GuestRun(spin)
    with pytest.raises(AssertionError, match="something spins"):
        guest.settle()
    guest.close()


def test_a_run_that_has_ended_takes_no_calls() -> None:
    guest = GuestRun(nothing)
    with pytest.raises(AssertionError, match="the run has ended"):
        guest.settle()
    with pytest.raises(AssertionError, match="the run has ended"):
        guest.settle()
    guest.close()
