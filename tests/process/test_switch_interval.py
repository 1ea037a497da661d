"""The engine's process sets how long a thread waits before it asks for the interpreter's lock."""

from __future__ import annotations

import sys

import pytest
import trio

from tests.process.engine_programs import open_engine_under_test, scripted_command
from trio_engine import EngineConfig, open_inproc_engine
from trio_engine.cli.engine import SWITCH_INTERVAL_S
from trio_engine.executor.null import NullExecutor
from trio_engine.testing.wire_front_end import WireFrontEnd

TELLS_INTERVAL = """
def __init__(self, *args, **options):
    super().__init__(*args, utilities={"switch_interval": sys.getswitchinterval}, **options)
"""


async def test_the_engine_process_has_its_own() -> None:
    with trio.fail_after(100.0):
        async with WireFrontEnd() as front_end:
            address = f"--handshake-address={front_end.handshake_address}"
            command = scripted_command(address, proc=TELLS_INTERVAL)
            async with open_engine_under_test(command):
                await front_end.start_up()
                answer = await front_end.call_utility("switch_interval")
    assert answer.result is not None
    assert answer.result.value == pytest.approx(SWITCH_INTERVAL_S, abs=1e-6)


async def test_an_engine_in_the_process_of_a_service_leaves_it_alone() -> None:
    before = sys.getswitchinterval()
    assert before > 2 * SWITCH_INTERVAL_S
    async with open_inproc_engine(EngineConfig(executor="null"), NullExecutor) as engine:
        await engine.complete([1, 2, 3])
        assert sys.getswitchinterval() == before
