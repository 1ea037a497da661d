"""Whether an engine grows with the requests that it has served.

    python -m tests.benchmarks.leaks                      # all four ways, 120,000 requests each
    python -m tests.benchmarks.leaks --way process-wire --requests 12000 --window 5000

Every sixth request is a long one that its client aborts, at once or after its first token; the
others end after one token. Objects that the garbage collector knows of and the memory in RAM are
compared before and after the last ``--window`` requests, both times with nothing left to do.

Ways: an engine of its own process or of this one, behind our client or behind a front end that
is played by hand.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from tests.benchmarks.engines import counting_command, open_wire_engine
from tests.benchmarks.figures import MB, Report, rss_bytes
from tests.process.processes import child_pids
from trio_engine.client.inproc_client import open_inproc_engine
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.engine.engine_core_proc import run_engine_core
from trio_engine.executor.null import VOCAB_SIZE, NullExecutor
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.testing.wire_front_end import WireFrontEnd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager

    from trio_engine.client.base import EngineClient

ONE_TOKEN = SamplingParams(max_tokens=1)
LONG = SamplingParams(max_tokens=1000, output_kind=RequestOutputKind.DELTA)
ABORTED_EVERY = 6
NUM_OPEN = 64
"""Requests at once: enough for full batches, few enough that an aborted one can be anywhere."""

MAX_OBJECTS = 200
MAX_MB = 4.0
NUM_BLOCKS = 2048
"""So few that the prefix cache, whose index grows until each block is in it, is full long before
the first look."""

CONFIG = EngineConfig(executor="null", max_num_seqs=256, num_blocks=NUM_BLOCKS)


class Size(NamedTuple):
    """What is there after so many requests."""

    num_objects: int
    rss_mb: float


class Subject(NamedTuple):
    """An engine and its client, by what is done with them.

    ``serve`` runs the requests of these numbers to their ends; ``measure`` tells the size.
    """

    serve: Callable[[range], Awaitable[None]]
    measure: Callable[[], Awaitable[Size]]


def prompt_of(number: int) -> list[int]:
    """One block of the prefix cache that hardly any other request shares."""
    return [(number + position) % VOCAB_SIZE for position in range(CONFIG.block_size)]


def is_aborted(number: int) -> bool:
    return number % ABORTED_EVERY == 0


def is_aborted_at_once(number: int) -> bool:
    """Of the aborted ones: else after the first token."""
    return number % (2 * ABORTED_EVERY) == 0


# Behind our client


async def serve_by_client(engine: EngineClient, numbers: range) -> None:
    remaining = iter(numbers)
    async with trio.open_nursery() as nursery:
        for _ in range(NUM_OPEN):
            nursery.start_soon(_serve_in_turn, engine, remaining)
    # The same road as the last ABORT: by its answer that has arrived.
    await engine.call_utility("is_sleeping")


async def _serve_in_turn(engine: EngineClient, remaining: Iterator[int]) -> None:
    for number in remaining:
        if not is_aborted(number):
            await engine.complete(prompt_of(number), ONE_TOKEN)
            continue
        async with engine.generate(prompt_of(number), LONG) as stream:
            if not is_aborted_at_once(number):
                await anext(aiter(stream))
            else:
                await trio.lowlevel.checkpoint()


# Behind a front end played by hand


async def serve_by_wire(front_end: WireFrontEnd, numbers: range) -> None:
    remaining = iter(numbers)
    wait_for_a_token: set[str] = set()
    num_open = 0

    async def start_next() -> int:
        number = next(remaining, None)
        if number is None:
            return 0
        request_id = f"request-{number}"
        max_tokens = 1000 if is_aborted(number) else 1
        await front_end.add(request_id, prompt_of(number), max_tokens=max_tokens)
        if is_aborted_at_once(number):
            await front_end.abort(request_id)
        elif is_aborted(number):
            wait_for_a_token.add(request_id)
        return 1

    for _ in range(NUM_OPEN):
        num_open += await start_next()
    while num_open:
        message = await front_end.next_outputs()
        for output in message.outputs:
            if output.request_id in wait_for_a_token:
                wait_for_a_token.remove(output.request_id)
                await front_end.abort(output.request_id)
        for request_id in message.finished_requests or ():
            del front_end.logs[(0, request_id)]
            num_open += await start_next() - 1


# The four ways


async def measure_here() -> Size:
    gc.collect()
    return Size(len(gc.get_objects()), rss_bytes(os.getpid()) / MB)


@asynccontextmanager
async def inproc_client() -> AsyncIterator[Subject]:
    async with open_inproc_engine(CONFIG, NullExecutor) as engine:
        yield Subject(partial(serve_by_client, engine), measure_here)


@asynccontextmanager
async def inproc_wire() -> AsyncIterator[Subject]:
    async with WireFrontEnd() as front_end, trio.open_nursery() as nursery:
        run = partial(
            run_engine_core,
            CONFIG,
            executor_factory=NullExecutor,
            handshake_address=front_end.handshake_address,
        )
        nursery.start_soon(run)
        await front_end.start_up()
        yield Subject(partial(serve_by_wire, front_end), measure_here)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def process_client() -> AsyncIterator[Subject]:
    before = child_pids()
    async with open_engine(CONFIG, command=counting_command()) as engine:
        (pid,) = child_pids() - before

        async def measure() -> Size:
            return Size(await engine.call_utility("count_objects"), rss_bytes(pid) / MB)

        yield Subject(partial(serve_by_client, engine), measure)


@asynccontextmanager
async def process_wire() -> AsyncIterator[Subject]:
    async with open_wire_engine(counting_command(f"--num-blocks={NUM_BLOCKS}")) as (
        front_end,
        process,
    ):

        async def measure() -> Size:
            answer = await front_end.call_utility("count_objects")
            assert answer.result is not None, answer.failure_message
            return Size(answer.result.value, rss_bytes(process.process.pid) / MB)

        yield Subject(partial(serve_by_wire, front_end), measure)


WAYS: dict[str, Callable[[], AbstractAsyncContextManager[Subject]]] = {
    "inproc-client": inproc_client,
    "inproc-wire": inproc_wire,
    "process-client": process_client,
    "process-wire": process_wire,
}


async def measure_way(way: str, num_requests: int, window: int, report: Report) -> None:
    """Serves the requests one way and reports by how much the engine's process has grown."""
    async with WAYS[way]() as subject:
        started = trio.current_time()
        await subject.serve(range(num_requests - window))
        before = await subject.measure()
        await subject.serve(range(num_requests - window, num_requests))
        after = await subject.measure()
        rate = num_requests / (trio.current_time() - started)
    report.add(f"{way}: requests", rate, "/s")
    difference = abs(after.num_objects - before.num_objects)
    report.add(f"{way}: difference in objects", difference, "", below=MAX_OBJECTS)
    growth_mb = after.rss_mb - before.rss_mb
    # Memory of the benchmark's own past that is given back meanwhile is no leak.
    report.add(f"{way}: growth of memory", growth_mb, "MB", below=MAX_MB)
    report.add(f"{way}: memory", after.rss_mb, "MB")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=[*WAYS, "all"], default="all")
    parser.add_argument("--requests", type=int, default=120_000, help="aborted ones included")
    parser.add_argument("--window", type=int, default=50_000, help="requests between two looks")
    options = parser.parse_args(arguments)
    report = Report(f"leaks: {options.requests:,} requests, the last {options.window:,} compared")
    for way in WAYS if options.way == "all" else [options.way]:
        trio.run(measure_way, way, options.requests, options.window, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
