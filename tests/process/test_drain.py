"""A drain of an engine process, with everything that may come meanwhile."""

from __future__ import annotations

from signal import SIGTERM
from typing import TYPE_CHECKING

import pytest
import trio

from tests.process.engine_programs import (
    open_engine_under_test,
    scripted_command,
    steps_wait_while,
)
from tests.process.lone_client import LoneClient
from trio_engine.engine.exit import ExitStatus
from trio_engine.outputs import FinishReason
from trio_engine.testing.wire_front_end import WireFrontEnd
from trio_engine.transport.ipc import IpcDirectory

if TYPE_CHECKING:
    from pathlib import Path

TEST_TIMEOUT_S = 100.0
GONE_S = 2.0
PROMPT = [1, 2, 3]


@pytest.mark.slow
@pytest.mark.known_fault(kind="careless-drain")
async def test_a_drain_keeps_its_promises_to_everybody_and_its_deadline(tmp_path: Path) -> None:
    """Two run, one of them too long; one waits, one is aborted, one comes too late."""
    drain_s = 5.0
    with trio.fail_after(TEST_TIMEOUT_S), IpcDirectory() as directory:
        async with WireFrontEnd() as front_end:
            other = LoneClient(directory.path, 1)
            other.join(front_end.addresses)
            # Holds up steps of both, so that neither ends before the test is so far.
            held = tmp_path / "held"
            held.touch()
            command = scripted_command(
                "--null-step-ms=10",
                "--max-num-seqs=2",
                f"--shutdown-timeout={drain_s}",
                f"--handshake-address={front_end.handshake_address}",
                executor=steps_wait_while(held, num_rows=2),
            )
            async with open_engine_under_test(command) as engine:
                async with other:
                    await front_end.start_up()
                    await other.wait_announced()
                    await front_end.add("too-long", PROMPT, max_tokens=2000)
                    await front_end.wait_num_tokens("too-long", 1)
                    await other.add("enough-time", max_tokens=50)
                    await engine.wait_stderr("stepping")
                    await front_end.add("aborted", PROMPT, max_tokens=10)
                    await front_end.add("waiting", PROMPT, max_tokens=10)
                    await front_end.call_utility("is_sleeping")  # all of that has come
                    started = trio.current_time()
                    engine.send(SIGTERM)
                    await engine.wait_stderr("stop_requested")
                    await front_end.add("late", PROMPT)
                    assert (await front_end.finish("late")).finish_reason is FinishReason.ABORT
                    answer = await front_end.call_utility("is_sleeping")
                    assert answer.failure_message == "Server shutting down"
                    await front_end.abort("aborted")
                held.unlink()
                async with other:  # it has gone and come back
                    await read_end(other, "enough-time")
                log = await front_end.finish("waiting")
                assert (len(log.token_ids), log.finish_reason) == (10, FinishReason.LENGTH)
                log = await front_end.finish("too-long")
                assert log.finish_reason is FinishReason.ABORT
                assert trio.current_time() - started >= drain_s
                assert front_end.logs[(0, "aborted")].outputs == []
                assert await engine.wait(GONE_S) == ExitStatus.STOPPED


async def read_end(client: LoneClient, request_id: str) -> None:
    while True:
        for output in await client.receive():
            if output.request_id == request_id and output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH
                return
