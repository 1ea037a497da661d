"""A front end breaks that owns its engine, and takes the engine with it."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from tests.fair_time import wait_within
from tests.faults.breaking_engines import REACHED
from tests.faults.client_process import ENGINE_PID, TOKENS_ARE_RIGHT
from tests.faults.front_end_processes import FrontEndProcess, open_front_end_process
from tests.faults.matrix import Fault, Means, Moment, Side
from tests.faults.rows import faults
from tests.process.processes import thread_names, wait_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEST_TIMEOUT_S = 40.0
GONE_S = 2.0
"""The promise: from its owner's end to an engine's."""
INTERPRETER_START_S = 10.0
"""What is not counted in: an engine that is still being imported."""
FROZEN_S = 0.2

# What is said when the moment has come.
WORDS = {
    Moment.BEFORE_HELLO: ENGINE_PID,
    Moment.LOADING: "loading",
    Moment.MID_STEP: "stepping",
    Moment.DRAINING: "stop_requested",
}


@asynccontextmanager
async def open_owner(moment: Moment) -> AsyncIterator[tuple[FrontEndProcess, int]]:
    """An owner at the moment, and its engine's pid. The block's end checks that nothing is left."""
    tmpdir = tempfile.mkdtemp(prefix="te-")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_front_end_process("client_process", moment.name, tmpdir=tmpdir) as owner:
            engine_pid = int(await owner.wait_said(ENGINE_PID))
            try:
                await owner.wait_said(WORDS.get(moment, REACHED))
                yield owner, engine_pid
            finally:
                with suppress(ProcessLookupError):
                    os.kill(engine_pid, signal.SIGKILL)
    os.rmdir(tmpdir)  # which fails unless it is empty


@pytest.mark.known_fault(kind="orphan-engine")
@faults(Side.OWNER)
async def test_an_engine_ends_with_its_owner_and_leaves_nothing(fault: Fault) -> None:
    async with open_owner(fault.moment) as (owner, engine_pid):
        await owner.break_by(fault.means)
        if fault.means is Means.STOP:
            await check_frozen(fault.moment, owner, engine_pid)
            await owner.break_by(Means.KILL)
        is_importing = (fault.moment, fault.means) == (Moment.BEFORE_HELLO, Means.KILL)
        limit_s = INTERPRETER_START_S if is_importing else GONE_S
        await wait_within(limit_s, lambda: wait_ended(engine_pid), engine_pid)


@pytest.mark.slow
async def test_an_engine_that_is_frozen_when_its_owner_ends_is_gone_when_it_thaws() -> None:
    async with open_owner(Moment.STREAMING) as (owner, engine_pid):
        os.kill(engine_pid, signal.SIGSTOP)
        await owner.break_by(Means.KILL)
        os.kill(engine_pid, signal.SIGCONT)
        await wait_within(GONE_S, lambda: wait_ended(engine_pid), engine_pid)


async def check_frozen(moment: Moment, owner: FrontEndProcess, engine_pid: int) -> None:
    """A frozen owner is not a dead one: its engine waits for it."""
    if moment is Moment.BEFORE_HELLO:
        await wait_hello_sent(engine_pid)
    with trio.move_on_after(FROZEN_S) as scope:
        await wait_ended(engine_pid)
    assert scope.cancelled_caught
    if moment is Moment.STREAMING:
        owner.send(signal.SIGCONT)
        await owner.wait_said(TOKENS_ARE_RIGHT)


async def wait_hello_sent(engine_pid: int) -> None:
    """Its first ZeroMQ socket is for its HELLO, and nobody answers that."""
    while not any("ZMQbg/IO" in name for name in thread_names(engine_pid)):  # noqa: ASYNC110
        await trio.sleep(0.005)
