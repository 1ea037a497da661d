"""Tasks that serve a body: they outlive its cancellation and go with its block."""

from __future__ import annotations

import logging
import signal

import pytest
import trio

from trio_engine.client.service_tasks import open_service_tasks


async def test_they_run_on_while_a_cancelled_body_leaves() -> None:
    done = []

    async def serve(asked: trio.Event, answered: trio.Event) -> None:
        await asked.wait()
        answered.set()
        await trio.sleep_forever()

    with trio.fail_after(5), trio.CancelScope() as scope:
        async with open_service_tasks() as tasks:
            asked, answered = trio.Event(), trio.Event()
            tasks.start_soon(serve, asked, answered)
            try:
                scope.cancel()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    asked.set()
                    await answered.wait()
                    done.append("served")
    assert scope.cancelled_caught
    assert done == ["served"]


async def test_the_bodys_error_is_bare_and_has_its_own_traceback() -> None:
    error = ValueError("mine")

    async def body() -> None:
        async with open_service_tasks() as tasks:
            tasks.start_soon(trio.sleep_forever)
            raise error

    with pytest.raises(ValueError, match="mine") as caught:
        await body()
    assert caught.value is error
    assert error.__context__ is None


async def test_a_crash_is_logged_and_spares_the_body(caplog: pytest.LogCaptureFixture) -> None:
    async def crash() -> None:
        raise RuntimeError("bug")

    with caplog.at_level(logging.ERROR):
        async with open_service_tasks() as tasks:
            tasks.start_soon(crash)
            await trio.testing.wait_all_tasks_blocked()
    assert "service_task_crashed" in caplog.text


async def test_a_task_started_last_does_not_outlive_the_block() -> None:
    started = []

    async def serve() -> None:  # pragma: no cover
        started.append(True)
        await trio.sleep_forever()

    with trio.fail_after(5):
        async with open_service_tasks() as tasks:
            tasks.start_soon(serve)
    assert started == []


async def test_keyboard_interrupt_is_held_off() -> None:
    seen = []

    async def serve() -> None:
        seen.append(trio.lowlevel.currently_ki_protected())

    async with open_service_tasks() as tasks:
        tasks.start_soon(serve)
        await trio.testing.wait_all_tasks_blocked()
    assert seen == [True]


def test_ctrl_c_while_the_tasks_end_leaves_as_itself() -> None:
    async def end_slowly() -> None:
        try:
            await trio.sleep_forever()
        finally:
            signal.raise_signal(signal.SIGINT)

    async def work() -> None:
        async with open_service_tasks() as tasks:
            tasks.start_soon(end_slowly)
            await trio.testing.wait_all_tasks_blocked()

    with pytest.raises(KeyboardInterrupt):
        trio.run(work)
