"""``trio-engine bench``: loads on engines, and what they show.

Cli. Progress goes to standard error, if that is a terminal, and one table to standard output.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trio_engine.bench.engine import DEFAULT_STALL_TIMEOUT_S
from trio_engine.bench.plot import check_can_plot, write_plot
from trio_engine.bench.progress import CounterLine
from trio_engine.bench.report import BenchReport, report_to_json
from trio_engine.bench.workload import (
    MIX_MEAN_OUTPUT_TOKENS,
    MIX_MEAN_PROMPT_TOKENS,
    WORKLOADS,
)
from trio_engine.cli.bench_commands import (
    MIN_CONCURRENCY,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REQUESTS_PER_CONCURRENCY,
    compare,
    serve,
    step,
)
from trio_engine.client.engine_command import HANDSHAKE, PORT
from trio_engine.client.until_signal import run_until_signal
from trio_engine.config import EngineConfig
from trio_engine.engine_arguments import (
    add_engine_arguments,
    config_from_arguments,
)
from trio_engine.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import signal

DEFAULT_STEP_WORKLOADS = "single,conc32,conc256,churn"

SIGNAL_STATUS = 128
"""What a shell adds to a signal's number."""

SERVE_DESCRIPTION = (
    "Load one engine with requests of one length, or of the lengths of conversations: ours, with"
    " the engine options below, or any that speaks the protocol, by its command behind --, in which"
    f" {HANDSHAKE} becomes the front end's address, or {PORT} its port of 127.0.0.1. The table has"
    " tokens per second and the 50th, 90th and 99th percentiles of latencies, in milliseconds."
)
STEP_DESCRIPTION = (
    "Measure our engine without a model: tokens per second, microseconds of processor time for"
    " each token, the share of the device's time that a known request did not get (the bubble), and"
    " the mean microseconds of each phase of a step."
)
COMPARE_DESCRIPTION = (
    "Run two engines under the same loads in turns, and show the ratio of their tokens per second"
    " pair by pair. Each command is one word, with a place for the address."
)


def run(arguments: list[str]) -> int:
    """Runs one of the commands.

    Returns:
        0; 1 if requests ended badly or an engine failed; 2 if an option makes no sense; 128 and
        the signal's number if SIGTERM or SIGHUP ended it.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the engines were ended and what is complete was shown.
    """
    own, command = _split(arguments)
    options = _parser().parse_args(own)
    options.engine_command = command
    # What an engine writes belongs to it; its last line is in the error where it matters.
    logging.getLogger("trio_engine").addHandler(logging.NullHandler())
    report = BenchReport(command=options.name, engines=[])
    # Runs that are complete took minutes: whatever ends the rest, they are shown and kept.
    try:
        stopped_by = _work(options, report)
    except KeyboardInterrupt:
        _show(report, options, stopped_early=True)
        raise
    except EngineError as error:
        _show(report, options, stopped_early=True)
        _complain(error)
        return 2 if isinstance(error, ConfigError) else 1
    is_kept = _show(report, options, stopped_early=stopped_by is not None)
    if stopped_by is not None:
        return SIGNAL_STATUS + stopped_by
    if not is_kept:
        return 2
    return 1 if report.num_errors else 0


def _work(options: argparse.Namespace, report: BenchReport) -> signal.Signals | None:
    """Fills the report. Returns the signal that cut it short, if one did."""
    _check_command(options)
    _check_outputs(options)
    line = CounterLine(sys.stderr)
    try:
        return trio.run(run_until_signal, partial(options.work, options, line, report))
    finally:
        line.clear()


def _show(report: BenchReport, options: argparse.Namespace, *, stopped_early: bool) -> bool:
    """Prints and keeps what is complete, if anything is. Returns False if it cannot be kept."""
    if report.is_empty:
        return True
    report.stopped_early = stopped_early
    report.note_end()
    print(report.table(), flush=True)
    try:
        _keep(report, options)
    except ConfigError as error:
        _complain(error)
        return False
    return True


def _complain(error: EngineError) -> None:
    sys.stderr.write(f"trio-engine: {error}\n")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options, and what comes behind ``--``: argparse would take it for one of them."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


# Options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trio-engine bench",
        description="Put a load on engines and show what comes of it: a table on standard output,"
        " and a counter meanwhile on standard error if that is a terminal.",
        epilog="COMMAND --help tells its options.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add, summary, description in (
        ("serve", _add_serve, "latencies and throughput of one engine", SERVE_DESCRIPTION),
        ("step", _add_step, "what the engine itself costs, without a model", STEP_DESCRIPTION),
        ("compare", _add_compare, "two engines in turns, pair by pair", COMPARE_DESCRIPTION),
    ):
        add(commands.add_parser(name, help=summary, description=description))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(name="serve", work=serve)
    parser.usage = "trio-engine bench serve [OPTION]... [-- ENGINE COMMAND]"
    parser.add_argument(
        "--concurrency",
        metavar="N,...",
        help="requests open at once, one load for each number (default: 1,8,32)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="requests per second, at random moments, instead of a number at once",
    )
    parser.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"requests of each load (default: {REQUESTS_PER_CONCURRENCY} for each that is open at"
        f" once, and {REQUESTS_PER_CONCURRENCY * MIN_CONCURRENCY} at least)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="N",
        help=f"tokens of a prompt (default: {PROMPT_TOKENS:g}, with --mix a mean of"
        f" {MIX_MEAN_PROMPT_TOKENS:g})",
    )
    parser.add_argument(
        "--output-tokens",
        type=float,
        metavar="N",
        help=f"tokens of an answer (default: {OUTPUT_TOKENS:g}, with --mix a mean of"
        f" {MIX_MEAN_OUTPUT_TOKENS:g})",
    )
    parser.add_argument(
        "--mix", action="store_true", help="lengths as of conversations, around these as means"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of all that is drawn (default: 0)"
    )
    _add_outputs(parser)
    parser.add_argument(
        "--headless",
        action="store_true",
        help="the command's engine says that it is headless (it has an option --headless itself)",
    )
    add_engine_arguments(parser)


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.usage = "trio-engine bench step [OPTION]..."
    _add_workloads(parser, DEFAULT_STEP_WORKLOADS)
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="runs of each load (default: 3)"
    )
    _add_outputs(parser)
    add_engine_arguments(parser, executor="null", null_step_ms=2.0)
    parser.set_defaults(name="step", work=step)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(name="compare", work=compare)
    place = f"{HANDSHAKE} in it becomes an address, {PORT} a port of 127.0.0.1"
    parser.add_argument(
        "--first", required=True, metavar="COMMAND", help=f"runs the first engine; {place}"
    )
    parser.add_argument("--second", required=True, metavar="COMMAND", help="runs the second engine")
    parser.add_argument(
        "--headless", action="store_true", help="as for serve, about the second engine"
    )
    _add_workloads(parser, DEFAULT_STEP_WORKLOADS)
    parser.add_argument(
        "--pairs", type=int, default=5, metavar="N", help="runs of each engine (default: 5)"
    )
    _add_outputs(parser)


def _add_workloads(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--workloads",
        default=default,
        metavar="NAME,...",
        help=f"of {', '.join(WORKLOADS)} (default: {default})",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="so many times as many requests; below 1 for a quick look (default: 1)",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures there, and the versions"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw latencies and throughput as curves there; needs the extra bench",
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=DEFAULT_STALL_TIMEOUT_S,
        metavar="SECONDS",
        help="give up an engine that has requests and answers nothing for so long"
        f" (default: {DEFAULT_STALL_TIMEOUT_S:g} s)",
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
    if not options.stall_timeout > 0:
        raise ConfigError(f"stall_timeout must be above 0, got {options.stall_timeout}")
    if options.work is serve and options.rate is not None and options.concurrency is not None:
        raise ConfigError("rate and concurrency are two kinds of load: only one can be given")
    if not options.engine_command:
        if options.work is serve and options.headless:
            raise ConfigError("headless is about the engine command behind --, and there is none")
        return
    if options.work is not serve:
        raise ConfigError("only serve takes an engine command behind --")
    if config_from_arguments(options) != EngineConfig():
        raise ConfigError("with an engine command its options belong into the command")


def _keep(report: BenchReport, options: argparse.Namespace) -> None:
    try:
        if options.json is not None:
            options.json.write_bytes(report_to_json(report))
        if options.plot is not None:
            write_plot(report, options.plot)
    except OSError as error:
        raise ConfigError(f"the figures cannot be kept: {error}") from error
