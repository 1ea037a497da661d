"""A client in a process of its own, for a test to break: ``python -m tests.faults.client_process``.

It owns its engine, or is the front end of one elsewhere if an address follows the moment. On its
standard output it says the engine's pid, how far it has come, and whether the tokens are right;
lines of an owned engine come there too.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import trio
from trio.testing import wait_all_tasks_blocked

from tests.faults.breaking_engines import CLOSE_SIGNAL, REACHED, serves
from tests.faults.matrix import Moment
from tests.process.engine_programs import LOADS_FOR_EVER, STEP_NEVER_RETURNS, scripted_command
from tests.process.processes import child_pids
from trio_engine.client.launcher import connect_engine, open_engine
from trio_engine.config import EngineConfig
from trio_engine.executor.null import null_token
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from trio_engine.client.base import EngineClient

ENGINE_PID = "engine pid "
TOKENS_ARE_RIGHT = "tokens are right"
PROMPT = [1, 2, 3]
LONG = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=500, ignore_eos=True)

FOR_EVER_S = 600.0
"""An owner's patience with its engine, so that the engine's end is its own doing."""


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())


def engine_for(moment: Moment) -> list[str]:
    if moment is Moment.LOADING:
        return scripted_command(executor=LOADS_FOR_EVER)
    if moment in (Moment.MID_STEP, Moment.DRAINING):
        return scripted_command(executor=STEP_NEVER_RETURNS)
    return serves(moment)


async def say_engine_pid() -> None:
    while not child_pids():  # noqa: ASYNC110  # no event tells of them
        await trio.sleep(0.001)
    (pid,) = child_pids()
    say(f"{ENGINE_PID}{pid}")


async def stream(engine: EngineClient) -> None:
    token_ids: list[int] = []
    async with engine.generate(PROMPT, LONG) as tokens:
        async for output in tokens:
            if not token_ids:
                say("streaming")
            token_ids += output.token_ids
    if token_ids == [null_token(PROMPT, place) for place in range(len(token_ids))]:
        say(TOKENS_ARE_RIGHT)


async def use(engine: EngineClient, moment: Moment) -> None:
    """Comes to the moment and stays there; draining begins when this returns."""
    async with trio.open_nursery() as nursery:
        if moment is not Moment.IDLE:
            nursery.start_soon(stream, engine)
            await wait_all_tasks_blocked()
        if moment is Moment.CALL_PENDING:
            nursery.start_soon(engine.call_utility, "pause_scheduler", "wait")
            await wait_all_tasks_blocked()
        await engine.call_utility("is_sleeping")  # behind all that was sent
        if moment is Moment.DRAINING:
            nursery.cancel_scope.cancel()
            return
        say(REACHED)
        await trio.sleep_forever()


async def main(moment: Moment, address: str | None) -> None:
    signal.signal(CLOSE_SIGNAL, lambda *_: os._exit(0))
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    opened: AbstractAsyncContextManager[EngineClient]
    if address is None:
        config = EngineConfig(executor="null", exit_grace_s=FOR_EVER_S)
        opened = open_engine(config, command=engine_for(moment), terminate_timeout_s=FOR_EVER_S)
    else:
        opened = connect_engine(address)
    async with trio.open_nursery() as nursery:
        if address is None:
            nursery.start_soon(say_engine_pid)
        async with opened as engine:
            await use(engine, moment)


if __name__ == "__main__":
    trio.run(main, Moment[sys.argv[1]], sys.argv[2] if len(sys.argv) > 2 else None)
