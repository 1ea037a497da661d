"""Whoever asks an engine to stop ends in one place."""

from __future__ import annotations

import os
import signal
from io import FileIO
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import TEST_TIMEOUT_S
from trio_engine.engine.shutdown import STOP_SIGNALS, Shutdown, watch_owner, watch_signals
from trio_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def state(shutdown: Shutdown) -> tuple[bool, bool, bool]:
    return (
        shutdown.requested.is_set(),
        shutdown.abort_requested.is_set(),
        shutdown.owner_is_gone,
    )


def test_the_first_request_drains_and_the_second_aborts() -> None:
    shutdown = Shutdown()
    assert state(shutdown) == (False, False, False)
    shutdown.request("SIGTERM")
    assert state(shutdown) == (True, False, False)
    shutdown.request("SIGTERM")
    shutdown.request("SIGINT")
    assert state(shutdown) == (True, True, False)


def test_without_an_owner_there_is_nothing_to_drain_for() -> None:
    shutdown = Shutdown()
    shutdown.lose_owner()
    assert state(shutdown) == (True, True, True)


# Signals


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """Signals that came while no receiver was open."""
    numbers: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        numbers.append(number)

    old = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    yield numbers
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
async def test_a_signal_is_a_request(noted: list[int], number: signal.Signals) -> None:
    shutdown = Shutdown()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, shutdown)
            assert state(shutdown) == (False, False, False)
            os.kill(os.getpid(), number)
            await shutdown.requested.wait()
            assert not shutdown.abort_requested.is_set()
            os.kill(os.getpid(), number)
            await shutdown.abort_requested.wait()
            nursery.cancel_scope.cancel()
    assert noted == []
    os.kill(os.getpid(), number)  # a later one finds the handler that was there before
    assert noted == [number]


async def test_a_signal_from_before_trio_counts(noted: list[int]) -> None:
    shutdown = Shutdown()
    shutdown.early_signals.append("SIGTERM")
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_signals, shutdown)
        assert state(shutdown) == (True, False, False)
        nursery.cancel_scope.cancel()


# The owner


@pytest.fixture
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    read_end, write_end = os.pipe()
    with FileIO(read_end, "r") as reading, FileIO(write_end, "w") as writing:
        yield reading, writing


async def test_the_end_of_the_pipe_is_the_end_of_the_owner(
    pipe: tuple[FileIO, FileIO],
) -> None:
    read_end, write_end = pipe
    shutdown = Shutdown()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_owner, shutdown, read_end.fileno())
            await wait_all_tasks_blocked()
            write_end.write(b"owners do not write, but who knows")
            await wait_all_tasks_blocked()
            assert state(shutdown) == (False, False, False)
            write_end.close()
    assert state(shutdown) == (True, True, True)


async def test_an_owner_that_is_gone_already(pipe: tuple[FileIO, FileIO]) -> None:
    read_end, write_end = pipe
    write_end.close()
    shutdown = Shutdown()
    with trio.fail_after(TEST_TIMEOUT_S):
        await watch_owner(shutdown, read_end.fileno())
    assert shutdown.owner_is_gone


async def test_a_descriptor_that_is_no_pipe_is_a_mistake(tmp_path: os.PathLike[str]) -> None:
    shutdown = Shutdown()
    for descriptor in (-1, os.open(tmp_path, os.O_RDONLY)):
        with pytest.raises(ConfigError, match=f"owner descriptor {descriptor} is no pipe"):
            await watch_owner(shutdown, descriptor)
    os.close(descriptor)
    assert state(shutdown) == (False, False, False)
