"""Waves are for ranks that step together. An engine by itself tolerates all that is said of them.

Nothing about a wave starts or stops it, holds a request up, or is told by it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import (
    CONFIG,
    PROMPT,
    TEST_TIMEOUT_S,
    check_nothing_held,
    null_tokens,
    open_scripted,
)
from trio_engine.engine.engine_core_proc import run_engine_core
from trio_engine.testing.requests import make_request
from trio_engine.testing.scripted_executor import ScriptedExecutor
from trio_engine.testing.wire_front_end import WireFrontEnd
from trio_engine.transport.context import open_context
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import RequestEncoder
from trio_engine.wire.messages import COORDINATOR_READY, StartDPWave

if TYPE_CHECKING:
    from pathlib import Path

    from trio_engine.outputs import EngineCoreOutputs

pytestmark = pytest.mark.known_fault(kind="stale-wave")

WAVES = [0, 1, 0, 7, 3, 2**40, 0]
"""Of requests that come one after the other: the first ever, ahead, and behind the last."""


class Ears:
    """A front end that notes every message for its first client."""

    def __init__(self, front_end: WireFrontEnd) -> None:
        self.front_end = front_end
        self.heard: list[EngineCoreOutputs] = []

    async def add(self, request_id: str, wave: int) -> None:
        self.front_end.listen(request_id)
        request = make_request(request_id, PROMPT, max_tokens=3)
        request.current_wave = wave
        await self.front_end.send(request)

    async def finish(self, request_id: str) -> None:
        log = self.front_end.logs[(0, request_id)]
        while log.finish_reason is None:
            self.heard.append(await self.front_end.next_outputs())
        assert log.token_ids == null_tokens(3)

    def check_no_wave_was_told(self) -> None:
        assert self.heard
        assert all(told.wave_complete is told.start_wave is None for told in self.heard)


async def test_a_request_of_any_wave_runs_at_once() -> None:
    async with open_scripted() as (front_end, proc, _):
        ears = Ears(front_end)
        for number, wave in enumerate(WAVES):
            await ears.add(f"r{number}", wave)
            await ears.finish(f"r{number}")
        for number, wave in enumerate(WAVES):  # and together
            await ears.add(f"s{number}", wave)
        for number in range(len(WAVES)):
            await ears.finish(f"s{number}")
        ears.check_no_wave_was_told()
        check_nothing_held(proc)


async def test_a_request_of_a_wave_that_is_over_comes_as_another_one_ends() -> None:
    async with open_scripted() as (front_end, proc, executor):
        ears, gate = Ears(front_end), executor.gates["collect"]
        for number in range(20):
            gate.close()
            await ears.add(f"last {number}", 4)
            await gate.wait_held()
            gate.open()
            await ears.add(f"next {number}", 3)
            await ears.finish(f"last {number}")
            await ears.finish(f"next {number}")
        ears.check_no_wave_was_told()
        check_nothing_held(proc)


async def test_a_wave_does_not_end_a_pause_and_a_resume_needs_none() -> None:
    async with open_scripted() as (front_end, proc, executor):
        ears = Ears(front_end)
        await front_end.call_utility("pause_scheduler", "keep")
        await ears.add("x", 9)
        for wave in (0, 9, 10):
            await front_end.send(StartDPWave(wave, None))  # not from a coordinator: a log line
        assert (await front_end.call_utility("is_scheduler_paused")).result == (None, True)
        assert not [call for call in executor.calls if call.startswith("launch")]
        await front_end.call_utility("resume_scheduler")
        await ears.finish("x")
        ears.check_no_wave_was_told()
        check_nothing_held(proc)


async def test_a_coordinator_s_waves_start_no_step_and_are_not_answered(tmp_path: Path) -> None:
    """Later and earlier ones, for all engines and for all but this one, as it knows them."""
    encoder = RequestEncoder()
    executor = ScriptedExecutor(CONFIG)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_context() as context, WireFrontEnd() as front_end:
            coordinator = context.socket(SocketKind.XPUB)
            front_end.addresses.coordinator_input = coordinator.bind(f"ipc://{tmp_path}/in")
            told = context.socket(SocketKind.PULL)
            front_end.addresses.coordinator_output = told.bind(f"ipc://{tmp_path}/out")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    partial(
                        run_engine_core,
                        CONFIG,
                        executor_factory=lambda _: executor,
                        handshake_address=front_end.handshake_address,
                    )
                )
                machine = await front_end.greet()
                assert await coordinator.receive() == [b"\x01"]
                await coordinator.send([COORDINATOR_READY])
                await front_end.wait_ready(machine)
                for wave, excluded in ((3, None), (1, 0), (4, 1), (4, b"\x00\x00"), (0, None)):
                    await coordinator.send(encoder.encode(StartDPWave(wave, excluded)))
                    await coordinator.send([COORDINATOR_READY])
                await front_end.call_utility("is_sleeping")
                await wait_all_tasks_blocked()
                assert not [call for call in executor.calls if call.startswith("launch")]
                ears = Ears(front_end)
                for number, wave in enumerate(WAVES):
                    await ears.add(f"r{number}", wave)
                    await ears.finish(f"r{number}")
                ears.check_no_wave_was_told()
                with pytest.raises(trio.WouldBlock):
                    told.receive_nowait()
                nursery.cancel_scope.cancel()
