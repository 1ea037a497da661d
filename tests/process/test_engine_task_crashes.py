"""Whichever task of an engine process has a bug, and however many: one status, one notice."""

from __future__ import annotations

from signal import SIGTERM
from typing import TYPE_CHECKING

import pytest
import trio

from tests.process.engine_programs import (
    STEP_FAILS,
    EngineUnderTest,
    open_engine_under_test,
    scripted_command,
)
from trio_engine.engine.exit import ExitStatus
from trio_engine.testing.wire_front_end import WireFrontEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = [pytest.mark.slow, pytest.mark.known_fault(kind="wrapped-error")]

TEST_TIMEOUT_S = 100.0
GONE_S = 2.0

PLANTED = """
def fail(self, *_):
    raise RuntimeError("a bug of ours")

async def _run_steps(self, work, loop):
    self.loop = loop
    self.plant(work)
    await super()._run_steps(work, loop)

def close_readers(self):
    for socket in list(self._context._sockets):
        if socket.statistics().tasks_waiting_receive:
            socket.close()
"""
SIGNAL_WATCH = PLANTED + "def plant(self, work): self.shutdown.request = self.fail\n"
OWNER_WATCH = PLANTED + "def plant(self, work): self.shutdown.lose_owner = self.fail\n"
# Whichever writer first tells of a request; at the end the others must still say their last words.
WRITER = """
has_failed = False

async def _open_links(self, *args):
    self._links._clock = self.clock
    return await super()._open_links(*args)

def clock(self):
    if self._loop.core.has_requests and not self.has_failed:
        self.has_failed = True
        raise RuntimeError("a bug of ours")
    return time.monotonic()
"""
# The step's failure comes as an event of the thread; the readers fail in the same turn.
READERS_AND_STEP = (
    PLANTED
    + """
def plant(self, work):
    take_events = self.loop._take_events

    def fail_and_take():
        if self.loop._forward.events:
            self.close_readers()
        take_events()

    self.loop._take_events = fail_and_take
"""
)


async def ask(front_end: WireFrontEnd, _engine: EngineUnderTest) -> None:
    await front_end.add("x", [1, 2, 3], client=0, max_tokens=1000)


async def ask_to_stop(_front_end: WireFrontEnd, engine: EngineUnderTest) -> None:
    engine.send(SIGTERM)


async def end_owner(_front_end: WireFrontEnd, engine: EngineUnderTest) -> None:
    engine.end_owner()


@pytest.mark.parametrize(
    ("proc", "executor", "provoke", "told"),
    [
        pytest.param(SIGNAL_WATCH, "pass", ask_to_stop, [0, 1], id="signal watch"),
        pytest.param(OWNER_WATCH, "pass", end_owner, [0, 1], id="owner watch"),
        pytest.param(WRITER, "pass", ask, [1], id="writer"),
        pytest.param(READERS_AND_STEP, STEP_FAILS, ask, [0, 1], id="readers and step"),
    ],
)
async def test_every_client_is_told_and_the_status_is_that_of_a_crash(
    proc: str,
    executor: str,
    provoke: Callable[[WireFrontEnd, EngineUnderTest], Awaitable[None]],
    told: list[int],
) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(2) as front_end:
            address = f"--handshake-address={front_end.handshake_address}"
            command = scripted_command(address, proc=proc, executor=executor)
            async with open_engine_under_test(command, owned=True) as engine:
                await front_end.start_up()
                await front_end.call_utility("is_sleeping", client=1)
                await provoke(front_end, engine)
                for client in told:
                    await front_end.wait_dead(client)
                assert await engine.wait(GONE_S) == ExitStatus.CRASHED
                assert "engine_failed ready=True" in engine.stderr
                assert "Cancelled" not in engine.stderr
