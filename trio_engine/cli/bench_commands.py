"""What ``trio-engine bench`` does once its options are known: engines, loads, and a report.

Cli. The report is filled as runs are complete, so that what ends the rest cannot lose them.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from trio_engine.bench.compare import compare_engines
from trio_engine.bench.engine import open_bench_engine
from trio_engine.bench.figures import Comparison
from trio_engine.bench.load import run_load
from trio_engine.bench.workload import (
    MIX_MEAN_OUTPUT_TOKENS,
    MIX_MEAN_PROMPT_TOKENS,
    WORKLOADS,
    Workload,
)
from trio_engine.client.engine_command import HANDSHAKE
from trio_engine.engine_arguments import config_from_arguments, config_to_arguments
from trio_engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from contextlib import AbstractAsyncContextManager

    from trio_engine.bench.engine import BenchEngine
    from trio_engine.bench.progress import CounterLine
    from trio_engine.bench.report import BenchReport

T = TypeVar("T")

MAX_SCALE = 1000.0
"""A million requests are made and encoded beforehand; more would not fit into memory."""

DEFAULT_CONCURRENCY = "1,8,32"
REQUESTS_PER_CONCURRENCY = 8
MIN_CONCURRENCY = 4
"""``serve`` sends so many requests for each that is open at once, and as if at least so many were,
unless told otherwise."""

PROMPT_TOKENS = 128.0
OUTPUT_TOKENS = 64.0


async def serve(options: argparse.Namespace, line: CounterLine, report: BenchReport) -> None:
    """Loads one engine with each number of requests at once, or at a rate."""
    command = options.engine_command or _own_command(options)
    workloads = _serve_workloads(options)
    report.engines.append(command)
    line.note("starting the engine")
    async with _open_engine(command, options, is_headless=options.headless) as engine:
        report.start_s.append(engine.start_s)
        for workload in workloads:
            await run_load(engine, workload.warm_up)
            progress = line.of(f"{workload.concurrency} at once", workload.num_requests)
            report.figures.append(await run_load(engine, workload, progress))


async def step(options: argparse.Namespace, line: CounterLine, report: BenchReport) -> None:
    """Loads our engine, which is to have no model, with each workload several times."""
    command = _own_command(options)
    workloads = _workloads(options)
    report.engines.append(command)
    async with _open_engine(command, options) as engine:
        report.start_s.append(engine.start_s)
        for workload in workloads:
            await run_load(engine, workload.warm_up)
            for number in range(options.repeat):
                name = f"{workload.name}, run {number + 1} of {options.repeat}"
                progress = line.of(name, workload.num_requests)
                report.figures.append(await run_load(engine, workload, progress))


async def compare(options: argparse.Namespace, line: CounterLine, report: BenchReport) -> None:
    """Loads two engines in turns."""
    report.engines.extend(_parse_command(command) for command in (options.first, options.second))
    workloads = _workloads(options)
    async with AsyncExitStack() as stack:
        engines: list[BenchEngine] = []
        for command, is_headless in zip(report.engines, (False, options.headless), strict=True):
            line.note(f"starting engine {len(engines) + 1}")
            opened = _open_engine(command, options, is_headless=is_headless)
            engines.append(await stack.enter_async_context(opened))
            report.start_s.append(engines[-1].start_s)
        for workload in workloads:
            await compare_engines(
                engines,
                workload,
                options.pairs,
                partial(line.of, num_requests=workload.num_requests),
                partial(report.note_pair, Comparison(workload=workload.name, pairs=[])),
            )


def _open_engine(
    command: list[str], options: argparse.Namespace, *, is_headless: bool = False
) -> AbstractAsyncContextManager[BenchEngine]:
    return open_bench_engine(
        command, is_headless=is_headless, stall_timeout_s=options.stall_timeout
    )


def _workloads(options: argparse.Namespace) -> list[Workload]:
    for number in ("repeat", "pairs"):
        if getattr(options, number, 1) < 1:
            raise ConfigError(f"{number} must be 1 or more, got {getattr(options, number)}")
    if not 0 < options.scale <= MAX_SCALE:
        raise ConfigError(f"scale must be above 0 and at most {MAX_SCALE:g}, got {options.scale}")
    chosen = []
    for name in options.workloads.split(","):
        if name not in WORKLOADS:
            raise ConfigError(f"no workload {name!r}: there are {', '.join(WORKLOADS)}")
        found = WORKLOADS[name]
        count = max(1, round(options.scale * found.num_requests))
        chosen.append(msgspec.structs.replace(found, num_requests=count))
    return chosen


def _serve_workloads(options: argparse.Namespace) -> list[Workload]:
    try:
        asked = _either(options.concurrency, DEFAULT_CONCURRENCY)
        numbers = [int(number) for number in asked.split(",")]
    except ValueError as error:
        raise ConfigError(f"concurrency must be numbers, got {options.concurrency!r}") from error
    if options.rate is not None:
        numbers = numbers[:1]
    defaults = (PROMPT_TOKENS, OUTPUT_TOKENS)
    if options.mix:
        defaults = (MIX_MEAN_PROMPT_TOKENS, MIX_MEAN_OUTPUT_TOKENS)
    return [
        Workload(
            name="serve",
            num_requests=_either(
                options.num_requests, REQUESTS_PER_CONCURRENCY * max(number, MIN_CONCURRENCY)
            ),
            concurrency=number,
            prompt_tokens=_either(options.prompt_tokens, defaults[0]),
            output_tokens=_either(options.output_tokens, defaults[1]),
            is_mix=options.mix,
            rate=options.rate,
            seed=options.seed,
        )
        for number in numbers
    ]


def _either(given: T | None, default: T) -> T:
    return default if given is None else given


def _own_command(options: argparse.Namespace) -> list[str]:
    arguments = config_to_arguments(config_from_arguments(options))
    start = [sys.executable, "-m", "trio_engine.engine", "--owner-fd=0"]
    return [*start, f"--handshake-address={HANDSHAKE}", *arguments]


def _parse_command(text: str) -> list[str]:
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"cannot parse the command {text!r}: {error}") from error
    if not command:
        raise ConfigError("an engine command is empty")
    return command
