"""A front end breaks that does not own its engine: the engine and its other front end go on."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tests.fair_time import wait_within
from tests.faults.breaking_engines import REACHED, STEP_S
from tests.faults.client_process import PROMPT, TOKENS_ARE_RIGHT
from tests.faults.front_end_processes import FrontEndProcess, open_front_end_process
from tests.faults.matrix import Fault, Means, Moment, Promise, Side
from tests.faults.rows import faults
from tests.faults.second_front_end import ADDRESSES, GO_SIGNAL
from tests.process.engine_programs import (
    EngineUnderTest,
    engine_command,
    open_engine_under_test,
    scripted_command,
)
from trio_engine.engine.exit import ExitStatus
from trio_engine.executor.null import null_token
from trio_engine.outputs import FinishReason
from trio_engine.testing.wire_front_end import WireFrontEnd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEST_TIMEOUT_S = 40.0
FLUSH_S = 1.0
"""The default of ``flush_timeout_s``, which a client that does not read may cost."""
GONE_S = 2.0
MAX_DELAY_S = 1.0
"""What no front end may cost another, beside the longest step."""
FROZEN_S = 0.2
MAX_GROWTH_BYTES = 20 << 20
"""Of the engine's memory, whatever a front end does not read."""
LOADS_A_MOMENT = """
def load(self):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(0.5)
    return super().load()
"""


def engine_for(fault: Fault) -> list[str]:
    if fault.moment is Moment.LOADING:
        return scripted_command("--null-step-ms=2", executor=LOADS_A_MOMENT)
    step_ms = 1000 * STEP_S if fault.moment is Moment.MID_STEP else 2
    return engine_command(
        f"--null-step-ms={step_ms}", "--max-model-len=1000000", "--num-blocks=100000"
    )


def num_tokens(fault: Fault) -> int:
    """Of the healthy stream: some 0.6 s."""
    return 3 if fault.moment is Moment.MID_STEP else 300


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def open_pair(
    fault: Fault, *options: str
) -> AsyncIterator[tuple[WireFrontEnd, FrontEndProcess, EngineUnderTest]]:
    """An engine with two front ends, the healthy one here; at the moment where one breaks."""
    tmpdir = tempfile.mkdtemp(prefix="te-")  # what a killed front end leaves is not ours to remove
    arguments = (fault.moment.name, fault.means.name)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_front_end_process("second_front_end", *arguments, tmpdir=tmpdir) as other,
            WireFrontEnd() as front_end,
        ):
            inbound, outbound = (await other.wait_said(ADDRESSES)).split()
            front_end.addresses.inputs.append(inbound)
            front_end.addresses.outputs.append(outbound)
            if fault.moment is Moment.BEFORE_HELLO:
                await other.break_by(fault.means)
            address = f"--handshake-address={front_end.handshake_address}"
            command = [*engine_for(fault), *options, address]
            async with open_engine_under_test(command) as engine:
                handshake = await front_end.greet()
                if fault.moment is Moment.LOADING:
                    await engine.wait_stderr("loading")
                    await other.break_by(fault.means)
                await front_end.wait_ready(handshake)
                yield front_end, other, engine


@pytest.mark.known_fault(kind="orphan-engine")
@faults(Side.FRONT_END, promise=Promise.LIVES)
async def test_the_other_front_end_notices_nothing(fault: Fault) -> None:
    async with open_pair(fault) as (front_end, other, engine):
        count = num_tokens(fault)
        await front_end.add("healthy", PROMPT, max_tokens=count)
        await front_end.wait_num_tokens("healthy", 1)
        before_bytes = resident_bytes(engine.process.pid)
        if fault.moment not in (Moment.BEFORE_HELLO, Moment.LOADING):
            other.send(GO_SIGNAL)  # not before, or its pause might hold up the healthy one
            await other.wait_said(REACHED)
            if fault.means not in (Means.SILENCE, Means.MALFORMED):
                await other.break_by(fault.means)
        await check_stream(front_end, "healthy", count, engine)
        if fault.moment is Moment.CALL_PENDING:
            await front_end.call_utility("resume_scheduler")  # a pause outlives whoever asked
        await front_end.add("later", PROMPT, max_tokens=count)
        await check_stream(front_end, "later", count, engine)
        if fault.means is Means.STOP:
            other.send(signal.SIGCONT)
            await other.wait_said(TOKENS_ARE_RIGHT)
        if fault.means is not Means.SILENCE:
            await wait_nothing_runs(front_end)
        assert resident_bytes(engine.process.pid) - before_bytes < MAX_GROWTH_BYTES
        engine.send(signal.SIGTERM)
        assert await engine.wait(FLUSH_S + GONE_S) == ExitStatus.STOPPED
        assert "Traceback" not in engine.stderr


async def check_stream(
    front_end: WireFrontEnd, request_id: str, count: int, engine: EngineUnderTest
) -> None:
    """It has its tokens, and none of them is late."""
    log = front_end.logs[(0, request_id)]
    while log.finish_reason is None:
        await wait_within(STEP_S + MAX_DELAY_S, front_end.next_outputs, engine.process.pid)
    assert log.finish_reason is FinishReason.LENGTH
    assert log.token_ids == [null_token(PROMPT, place) for place in range(count)]


async def wait_nothing_runs(front_end: WireFrontEnd) -> None:
    """Requests of a front end that is gone run to their limit, and no further."""
    await front_end.add("last", PROMPT, max_tokens=2)  # gauges come with steps
    while True:
        message = await front_end.next_outputs()
        if message.scheduler_stats is not None and not message.scheduler_stats.num_running_reqs:
            return


@faults(Side.FRONT_END, promise=Promise.ENDS)
async def test_a_drain_does_not_wait_for_it(fault: Fault) -> None:
    async with open_pair(fault, "--shutdown-timeout=60") as (front_end, other, engine):
        other.send(GO_SIGNAL)
        await other.wait_said(REACHED)
        await front_end.add("healthy", PROMPT, max_tokens=num_tokens(fault))
        await front_end.wait_num_tokens("healthy", 1)
        engine.send(signal.SIGTERM)
        await engine.wait_stderr("stop_requested")
        await other.break_by(fault.means)
        await check_stream(front_end, "healthy", num_tokens(fault), engine)
        assert await engine.wait(TEST_TIMEOUT_S) == ExitStatus.STOPPED
        assert "Traceback" not in engine.stderr


@pytest.mark.known_fault(kind="orphan-engine")
@faults(Side.ONLY_FRONT_END)
async def test_an_engine_that_nobody_owns_outlives_its_front_end(fault: Fault) -> None:
    """What it runs comes to its end, so that a drain is short."""
    tmpdir = tempfile.mkdtemp(prefix="te-")
    address = f"ipc://{tmpdir}/handshake"
    command = engine_command(
        "--headless", "--null-step-ms=2", "--shutdown-timeout=60", f"--handshake-address={address}"
    )
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_engine_under_test(command) as engine,
            open_front_end_process(
                "client_process", fault.moment.name, address, tmpdir=tmpdir
            ) as client,
        ):
            await client.wait_said(REACHED)
            before_bytes = resident_bytes(engine.process.pid)
            await client.break_by(fault.means)
            await trio.sleep(FROZEN_S)
            assert engine.process.poll() is None
            if fault.means is Means.STOP:
                client.send(signal.SIGCONT)
                await client.wait_said(TOKENS_ARE_RIGHT)
            assert resident_bytes(engine.process.pid) - before_bytes < MAX_GROWTH_BYTES
            engine.send(signal.SIGTERM)
            assert await engine.wait(TEST_TIMEOUT_S / 2) == ExitStatus.STOPPED
            assert "Traceback" not in engine.stderr
