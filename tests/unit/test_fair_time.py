"""Time in which others had the CPUs does not count towards a limit, and all other time does."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
import trio

from tests.fair_time import CpuDelay, wait_within

if TYPE_CHECKING:
    from trio.testing import MockClock


async def test_what_comes_in_time_is_returned(autojump_clock: MockClock) -> None:
    async def wait() -> str:
        await trio.sleep(0.9)
        return "it"

    assert await wait_within(1.0, wait) == "it"


async def test_what_does_not_come_is_too_slow(autojump_clock: MockClock) -> None:
    with pytest.raises(trio.TooSlowError):
        await wait_within(1.0, trio.sleep_forever)
    assert 1.0 <= trio.current_time() < 2.0


async def test_there_is_more_time_for_a_process_that_was_kept_from_its_cpu(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDelay, "so_far_s", lambda _: 1.5)
    with pytest.raises(trio.TooSlowError):
        await wait_within(1.0, trio.sleep_forever)
    assert trio.current_time() == 2.5


def test_a_sleeping_process_is_not_kept_from_its_cpu() -> None:
    delay = CpuDelay(os.getpid())
    time.sleep(0.5)
    # What it waited for a CPU on a busy machine is less than the sleep, which must not count.
    assert 0 <= delay.so_far_s() < 0.4


def test_a_thread_that_ends_takes_nothing_from_what_others_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter([{"1": 5 * 10**9, "2": 10**9}, {"2": 3 * 10**9}])
    monkeypatch.setattr("tests.fair_time._waited_ns", lambda _: next(readings))
    assert CpuDelay(os.getpid()).so_far_s() == 2.0


def test_a_process_that_is_gone_is_kept_from_nothing() -> None:
    assert CpuDelay(2**22 + 1).so_far_s() == 0
