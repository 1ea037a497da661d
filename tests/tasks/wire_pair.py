"""A client and the engine that a test plays by hand, over real sockets."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import tokenizers
import trio

from trio_engine.client.async_client import AsyncEngineClient
from trio_engine.client.launcher import connect_engine
from trio_engine.testing.wire_engine import ScriptedWireEngine, open_scripted_engine
from trio_engine.text.tokenizer import Tokenizer
from trio_engine.transport.ipc import IpcDirectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.client.base import EngineClient

TEST_TIMEOUT_S = 20.0
"""No test here waits for time to pass; this ends one that would hang."""


@asynccontextmanager
async def open_pair(
    *, tokenizer: Tokenizer | None = None, max_in_flight: int | None = None
) -> AsyncIterator[tuple[AsyncEngineClient, ScriptedWireEngine]]:
    """A connected pair; at the end the client must hold nothing."""
    with IpcDirectory() as directory:
        address = directory.address("handshake")
        async with (
            open_scripted_engine(address) as wire,
            connect_engine(address, tokenizer=tokenizer, max_in_flight=max_in_flight) as client,
        ):
            assert isinstance(client, AsyncEngineClient)
            yield client, wire


async def fence(client: EngineClient, wire: ScriptedWireEngine) -> None:
    """Returns when the engine has received all that the client has posted so far.

    Aborts go before utility calls, ADDs before later utility calls, on one ordered socket.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.call_utility, "is_sleeping")
        await wire.answer(await wire.receive_utility(), False)


async def check_all_aborted(client: EngineClient, wire: ScriptedWireEngine) -> None:
    """Asserts that each request that reached the engine was aborted once, and nothing is left."""
    await fence(client, wire)
    assert sorted(wire.aborted_ids) == sorted(wire.added_ids)
    statistics = client.statistics()
    assert (statistics.num_requests, statistics.num_utility_calls, statistics.num_unsent) == (
        0,
    ) * 3


def make_letter_tokenizer() -> Tokenizer:
    """One token a byte: text and tokens can be written down by hand. No special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, source="letters")
