"""``trio-engine bench``: loads on engines, and what they show.

Cli. Progress goes to standard error, if that is a terminal, and one table to standard output.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from trio_engine.bench.compare import compare_engines
from trio_engine.bench.engine import open_bench_engine
from trio_engine.bench.load import run_load
from trio_engine.bench.plot import check_can_plot, write_plot
from trio_engine.bench.progress import CounterLine
from trio_engine.bench.report import BenchReport
from trio_engine.bench.workload import (
    MIX_MEAN_OUTPUT_TOKENS,
    MIX_MEAN_PROMPT_TOKENS,
    WORKLOADS,
    Workload,
)
from trio_engine.client.engine_command import HANDSHAKE, PORT
from trio_engine.config import EngineConfig
from trio_engine.engine_arguments import (
    add_engine_arguments,
    config_from_arguments,
    config_to_arguments,
)
from trio_engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_engine.bench.engine import BenchEngine

T = TypeVar("T")

DEFAULT_STEP_WORKLOADS = "single,conc32,conc256,churn"
MAX_SCALE = 1000.0
"""A million requests are made and encoded beforehand; more would not fit into memory."""

REQUESTS_PER_CONCURRENCY = 8
"""``serve`` sends so many requests for each that is open at once, unless told otherwise."""


def run(arguments: list[str]) -> int:
    """Runs one of the commands. Returns 0, 1 if requests ended badly or an engine failed, or 2."""
    parser = _parser()
    own, command = _split(arguments)
    options = parser.parse_args(own)
    options.engine_command = command
    # What an engine writes belongs to it; its last line is in the error where it matters.
    logging.getLogger("trio_engine").addHandler(logging.NullHandler())
    try:
        _check_command(options)
        _check_outputs(options)
        work: Callable[[argparse.Namespace, CounterLine], Awaitable[BenchReport]] = options.work
        line = CounterLine(sys.stderr)
        try:
            report = trio.run(partial(work, options, line))
        finally:
            line.clear()
        report.note_end()
        print(report.table())
        _keep(report, options)
    except EngineError as error:
        sys.stderr.write(f"trio-engine: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 1 if report.num_errors else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options, and what comes behind ``--``: argparse would take it for one of them."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


# Options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trio-engine bench", description="Put a load on engines and show what comes of it."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="latencies and throughput of one engine"))
    _add_step(commands.add_parser("step", help="what the engine itself costs, without a model"))
    _add_compare(commands.add_parser("compare", help="two engines in turns, pair by pair"))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(work=_serve)
    parser.usage = "trio-engine bench serve [OPTION]... [-- ENGINE COMMAND]"
    parser.add_argument(
        "--concurrency",
        default="1,8,32",
        metavar="N,...",
        help="requests open at once, one load for each number",
    )
    parser.add_argument(
        "--rate", type=float, metavar="R", help="requests per second, at random moments, instead"
    )
    parser.add_argument("--num-requests", type=int, metavar="N", help="of each load")
    parser.add_argument("--prompt-tokens", type=float, metavar="N", help="of a request")
    parser.add_argument("--output-tokens", type=float, metavar="N", help="of a request")
    parser.add_argument(
        "--mix", action="store_true", help="lengths as of conversations, around these as means"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of all that is drawn")
    _add_outputs(parser)
    parser.add_argument("--headless", action="store_true", help="the command's engine says so")
    add_engine_arguments(parser)


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(work=_step)
    _add_workloads(parser, DEFAULT_STEP_WORKLOADS)
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each load")
    _add_outputs(parser)
    add_engine_arguments(parser)
    parser.set_defaults(executor="null", null_step_ms=2.0)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(work=_compare)
    place = f"{HANDSHAKE} in it becomes an address, {PORT} a port of 127.0.0.1"
    parser.add_argument("--first", required=True, metavar="COMMAND", help=f"runs one; {place}")
    parser.add_argument("--second", required=True, metavar="COMMAND", help="runs the other")
    parser.add_argument(
        "--headless", action="store_true", help="the second engine says that it is headless"
    )
    _add_workloads(parser, DEFAULT_STEP_WORKLOADS)
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each engine")
    _add_outputs(parser)


def _add_workloads(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--workloads",
        default=default,
        metavar="NAME,...",
        help=f"of {', '.join(WORKLOADS)}; the default is {default}",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="so many times as many requests; below 1 for a quick look",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="latencies and throughput as curves"
    )


def _check_outputs(options: argparse.Namespace) -> None:
    """What can be known before minutes of work: that their outcome can be kept."""
    for path in (options.json, options.plot):
        if path is None:
            continue
        if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise ConfigError(f"cannot write to {str(path)!r}")
    if options.plot is not None:
        check_can_plot(options.plot)


def _check_command(options: argparse.Namespace) -> None:
    """Nothing that somebody wrote is left out without a word."""
    if not options.engine_command:
        return
    if options.work is not _serve:
        raise ConfigError("only serve takes an engine command behind --")
    if config_from_arguments(options) != EngineConfig():
        raise ConfigError("with an engine command its options belong into the command")


def _keep(report: BenchReport, options: argparse.Namespace) -> None:
    try:
        if options.json is not None:
            encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
            options.json.write_bytes(encoded + b"\n")
        if options.plot is not None:
            write_plot(report, options.plot)
    except OSError as error:
        raise ConfigError(f"the figures cannot be kept: {error}") from error


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
        numbers = [int(number) for number in options.concurrency.split(",")]
    except ValueError as error:
        raise ConfigError(f"concurrency must be numbers, got {options.concurrency!r}") from error
    if options.rate is not None:
        numbers = numbers[:1]
    defaults = (MIX_MEAN_PROMPT_TOKENS, MIX_MEAN_OUTPUT_TOKENS) if options.mix else (128.0, 64.0)
    return [
        Workload(
            name="serve",
            num_requests=_either(options.num_requests, REQUESTS_PER_CONCURRENCY * max(number, 4)),
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


# Commands


async def _serve(options: argparse.Namespace, line: CounterLine) -> BenchReport:
    command = options.engine_command or _own_command(options)
    workloads = _serve_workloads(options)
    report = BenchReport(command="serve", engines=[command])
    line.note("starting the engine")
    async with open_bench_engine(command, is_headless=options.headless) as engine:
        for workload in workloads:
            await run_load(engine, workload.warm_up)
            progress = line.of(f"{workload.concurrency} at once", workload.num_requests)
            report.figures.append(await run_load(engine, workload, progress))
    return report


async def _step(options: argparse.Namespace, line: CounterLine) -> BenchReport:
    command = _own_command(options)
    workloads = _workloads(options)
    report = BenchReport(command="step", engines=[command])
    async with open_bench_engine(command) as engine:
        for workload in workloads:
            await run_load(engine, workload.warm_up)
            for number in range(options.repeat):
                name = f"{workload.name}, run {number + 1} of {options.repeat}"
                progress = line.of(name, workload.num_requests)
                report.figures.append(await run_load(engine, workload, progress))
    return report


async def _compare(options: argparse.Namespace, line: CounterLine) -> BenchReport:
    commands = [_parse_command(command) for command in (options.first, options.second)]
    workloads = _workloads(options)
    report = BenchReport(command="compare", engines=commands)
    async with AsyncExitStack() as stack:
        engines: list[BenchEngine] = []
        for command, is_headless in zip(commands, (False, options.headless), strict=True):
            line.note(f"starting engine {len(engines) + 1}")
            opened = open_bench_engine(command, is_headless=is_headless)
            engines.append(await stack.enter_async_context(opened))
        for workload in workloads:
            comparison = await compare_engines(
                engines,
                workload,
                options.pairs,
                partial(line.of, num_requests=workload.num_requests),
            )
            report.comparisons.append(comparison)
    return report
