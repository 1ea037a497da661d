"""Being the front end of an engine that was started elsewhere."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import trio

from tests.tasks.wire_pair import TEST_TIMEOUT_S
from trio_engine.client.front_end import open_front_end
from trio_engine.client.launcher import connect_engine
from trio_engine.errors import ConfigError, EngineStartError
from trio_engine.outputs import FinishReason
from trio_engine.testing.wire_engine import SCRIPTED_READY, open_scripted_engine
from trio_engine.transport.context import open_context
from trio_engine.transport.ipc import IpcDirectory
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.handshake import ExpectedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def address() -> Iterator[str]:
    with IpcDirectory() as directory:
        yield directory.address("handshake")


async def connect_and_leave(address: str, *, start_timeout_s: float = 10.0) -> None:
    async with connect_engine(address, start_timeout_s=start_timeout_s):
        pass


@pytest.mark.known_fault(kind="bad-address")
async def test_no_engine_in_time(address: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with pytest.raises(EngineStartError, match=r"within 0\.02 s.*missing.*HELLO"):
            await connect_and_leave(address, start_timeout_s=0.02)


async def test_the_address_is_free_again_afterwards(address: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        for _ in range(2):
            async with open_scripted_engine(address) as wire, connect_engine(address) as engine:
                await wire.wait_ready()
                assert engine.engines == {0: SCRIPTED_READY}


@pytest.mark.known_fault(kind="bad-address")
async def test_an_address_that_is_taken(address: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_front_end(address):
            with pytest.raises(ConfigError, match=address):
                await connect_and_leave(address)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
async def test_a_wildcard_is_refused_because_engines_must_connect_to_it(host: str) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        await connect_and_leave(f"tcp://{host}:29550")


@pytest.mark.parametrize("port", ["0", "*", "65536", "99999"])
async def test_a_port_that_no_engine_could_connect_to_is_refused(port: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S), pytest.raises(ConfigError, match="port must be"):
        await connect_and_leave(f"tcp://127.0.0.1:{port}")


async def test_over_tcp() -> None:
    """Input and output get ports of their own on the host of the handshake."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_front_end("tcp://127.0.0.1:0") as front_end:
            assert not front_end.handshake_address.endswith(":0")
            async with open_scripted_engine(front_end.handshake_address) as wire:
                await front_end.wait_engines_ready([ExpectedEngine(0, local=False)])
                await wire.send_tokens("x", [1], FinishReason.STOP)
                assert await front_end.output.receive()


async def test_a_strangers_message_is_ignored(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trio_engine")
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_context() as context:
            stranger = context.socket(SocketKind.DEALER, identity=b"stranger", linger_s=1.0)
            stranger.connect(address)
            await stranger.send([b"hello?"])
            async with open_front_end(address) as front_end, trio.open_nursery() as nursery:
                is_ready = trio.Event()

                @nursery.start_soon
                async def start() -> None:
                    await front_end.wait_engines_ready([ExpectedEngine(0, local=False)])
                    is_ready.set()

                while "start_up_message_ignored" not in caplog.text:
                    await stranger.send([b"hello?"])
                    await trio.lowlevel.checkpoint()
                # What it said last would be lost if it left as soon as it has said it.
                async with open_scripted_engine(address):
                    await is_ready.wait()
            assert front_end.describe_timeout(1.0).endswith("missing: its tokenizer")


async def test_an_engine_that_claims_to_be_spawned_here_is_refused(address: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_scripted_engine(address, local=True):
            with pytest.raises(EngineStartError, match="protocol"):
                await connect_and_leave(address)
