"""Addresses are bound before anybody is told of them, so that no start takes another's."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import trio

from tests.tasks.client_and_engine import open_client_and_engine
from tests.tasks.engine_parts import CONFIG, null_tokens
from tests.tasks.wire_pair import TEST_TIMEOUT_S
from trio_engine.client.launcher import connect_engine
from trio_engine.errors import ConfigError
from trio_engine.executor.null import NullExecutor
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.wire_engine import SCRIPTED_READY, open_scripted_engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.known_fault(kind="bad-address")

TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2)


async def test_two_engines_started_at_once_50_times_each_serve_their_own_client() -> None:
    async def use(prompt: list[int]) -> None:
        async with open_client_and_engine(NullExecutor(CONFIG)) as (client, _):
            output = await client.complete(prompt, TWO_TOKENS)
            assert output.token_ids == null_tokens(2, prompt)

    for number in range(50):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(use, [number])
            nursery.start_soon(use, [number, 1])


async def test_a_port_that_is_bound_already_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with trio.fail_after(TEST_TIMEOUT_S), pytest.raises(ConfigError, match=address):
            await open_and_leave(address)


async def open_and_leave(address: str) -> None:
    async with connect_engine(address):
        pass


async def test_the_socket_file_of_a_front_end_that_crashed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "handshake"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    assert path.exists()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with (
            open_scripted_engine(f"ipc://{path}") as wire,
            connect_engine(f"ipc://{path}") as engine,
        ):
            await wire.wait_ready()
            assert engine.engines == {0: SCRIPTED_READY}
