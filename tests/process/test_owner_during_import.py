"""An engine whose owner is killed while torch is imported.

That holds up every other thread of the engine, at times for a good part of a second.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
import trio

from tests.fair_time import wait_within
from tests.process.processes import children_of, wait_ended

TEST_TIMEOUT_S = 100.0
GONE_S = 2.0
"""The promise: from its owner's end to an engine's."""

OWNER = """
import trio
from trio_engine import EngineConfig, open_engine

async def main():
    async with open_engine(EngineConfig(model="smollm2"), tokenizer=None):
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.known_fault(kind="orphan-engine")
async def test_an_engine_whose_owner_is_killed_while_torch_is_imported_is_gone() -> None:
    # Short enough for sockets in it, which pytest's folder may not be.
    tmpdir = tempfile.mkdtemp(prefix="te-", dir="/tmp")
    with trio.fail_after(TEST_TIMEOUT_S):
        owner = await trio.lowlevel.open_process(
            [sys.executable, "-c", OWNER], env={**os.environ, "TMPDIR": tmpdir}
        )
        try:
            pid = await engine_that_imports_torch(owner.pid)
        finally:
            owner.kill()
            with trio.CancelScope(shield=True):
                await owner.wait()
        await wait_within(GONE_S, lambda: wait_ended(pid), pid)
    os.rmdir(tmpdir)  # which fails unless it is empty


async def engine_that_imports_torch(owner_pid: int) -> int:
    """Its pid, as soon as a library of torch is mapped there."""
    while True:
        for pid in children_of(owner_pid):
            if "libtorch" in mapped_files(pid):
                return pid
        await trio.sleep(0.005)  # a process cannot be waited on to do that


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()
