"""The clients over sockets do what every client must, in front of real engine processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from tests.process.processes import child_pids
from trio_engine.client.launcher import connect_engine, open_engine
from trio_engine.config import EngineConfig
from trio_engine.testing.check_client import check_client
from trio_engine.transport.ipc import IpcDirectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.client.base import EngineClient

CONFIG = EngineConfig(executor="null", null_step_ms=2.0, max_model_len=1024)
COMMAND = [
    *(sys.executable, "-m", "trio_engine.engine", "--headless"),
    *("--executor=null", "--null-step-ms=2", "--max-model-len=1024"),
]

LIMIT_S = 100.0
"""Of each step: there engines start, and that takes a while on a busy machine."""


class KillNewChildren:
    """Kills the children that this process has now and had not when this was made."""

    def __init__(self) -> None:
        self._before = child_pids()

    async def __call__(self, _: EngineClient) -> None:
        for pid in child_pids() - self._before:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
async def test_the_client_of_an_engine_of_its_own_conforms() -> None:
    await check_client(
        lambda max_in_flight: open_engine(CONFIG, max_in_flight=max_in_flight),
        kill_engine=KillNewChildren(),
        limit_s=LIMIT_S,
    )


@asynccontextmanager
async def open_connected(max_in_flight: int | None) -> AsyncIterator[EngineClient]:
    with IpcDirectory() as directory:
        address = directory.address("handshake")
        process = await trio.lowlevel.open_process(
            [*COMMAND, f"--handshake-address={address}"], stderr=subprocess.DEVNULL
        )
        try:
            async with connect_engine(address, max_in_flight=max_in_flight) as client:
                yield client
        finally:
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()


@pytest.mark.slow
async def test_the_client_of_an_engine_elsewhere_conforms() -> None:
    await check_client(open_connected, kill_engine=KillNewChildren(), limit_s=LIMIT_S)
