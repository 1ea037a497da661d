"""Engine processes of the benchmarks, and the front end that plays their clients."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from tests.process.engine_programs import (
    EngineUnderTest,
    engine_command,
    open_engine_under_test,
    scripted_command,
)
from trio_engine.testing.wire_front_end import WireFrontEnd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

START_TIMEOUT_S = 120.0
"""A small model is loaded in seconds, but the machine may be busy."""

NULL_ENGINE = ("--max-num-seqs=256", "--num-blocks=32768")
"""Room for 256 requests of 2,048 tokens, as in the engine's defaults for the null executor."""

MODEL_ENGINE = ("--executor=torch", "--max-num-seqs=16", "--num-blocks=1024")
"""The built-in model, and room for 16 requests of 1,024 tokens."""

COUNTS_OBJECTS = """
def __init__(self, *args, **options):
    import gc

    def count_objects():
        gc.collect()
        return len(gc.get_objects())

    super().__init__(*args, utilities={"count_objects": count_objects}, **options)
"""
"""An engine whose utility method ``count_objects`` tells what its garbage collector knows of."""


def null_command(*options: str) -> list[str]:
    """The engine command with the null executor."""
    return engine_command(*NULL_ENGINE, *options)


def counting_command(*options: str) -> list[str]:
    """The same with the utility method ``count_objects``."""
    return scripted_command(*NULL_ENGINE, *options, proc=COUNTS_OBJECTS)


@asynccontextmanager
async def open_wire_engine(
    command: list[str], *, outputs: Sequence[str | None] = (None,)
) -> AsyncIterator[tuple[WireFrontEnd, EngineUnderTest]]:
    """An engine process that has said READY, and its front end; it is killed if it still runs.

    ``outputs``: one for each client, where its outputs go; None is the front end's own socket.
    """
    async with WireFrontEnd(len(outputs)) as front_end:
        for client, output in enumerate(outputs):
            front_end.addresses.outputs[client] = output or front_end.addresses.outputs[client]
        address = f"--handshake-address={front_end.handshake_address}"
        async with open_engine_under_test([*command, address]) as engine:
            with trio.fail_after(START_TIMEOUT_S):
                await front_end.start_up()
            yield front_end, engine
