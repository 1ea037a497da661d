"""``trio-engine engine``: the engine process for any front end that speaks the protocol.

Cli. Reached through ``trio_engine.engine.__main__``, which has set up the early signal handlers.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import trio

from trio_engine.cli.executors import make_executor
from trio_engine.engine.engine_core_proc import EngineCoreProc, EngineIdentity
from trio_engine.engine.exit import ExitStatus
from trio_engine.engine.shutdown import STOP_SIGNALS
from trio_engine.engine_arguments import add_engine_arguments, config_from_arguments
from trio_engine.errors import ConfigError, EngineDeadError, EngineStartError
from trio_engine.observability.logs import configure_logging, log_start_up_failure

if TYPE_CHECKING:
    from types import FrameType

# How long a thread waits for the interpreter's lock before it asks for it. A step takes the lock
# again after each of torch's operations, and by default a busy loop may keep it for 5 ms each time.
# Measured on 2 cores, by 100 us over 5 ms: eight requests of the built-in model make 3% more
# tokens, with 51 ms between two in place of 57 in the 99th percentile; 2% fewer requests of one
# token are done without forward time (by 50 us 5%).
SWITCH_INTERVAL_S = 100e-6


def run(arguments: list[str]) -> int:
    """Runs an engine until it is asked to stop. Returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        proc = _make_proc(options)
    except ConfigError as error:
        parser.error(str(error))
    return run_proc(proc)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trio-engine engine",
        usage="%(prog)s [OPTION]...",
        description="Run the engine process for any front end that speaks vLLM's protocol. It ends"
        " with 0 when it was asked to stop, 1 when it crashed, 2 when it did not start.",
    )
    parser.add_argument(
        "--handshake-address",
        metavar="ADDR",
        help="where the front end's handshake is bound: tcp://HOST:PORT or ipc://PATH",
    )
    parser.add_argument(
        "--data-parallel-address",
        metavar="HOST",
        help="host of a TCP handshake, in place of the whole address",
    )
    parser.add_argument(
        "--data-parallel-rpc-port", type=int, metavar="PORT", help="port of a TCP handshake"
    )
    parser.add_argument(
        "--data-parallel-rank",
        type=int,
        default=0,
        metavar="I",
        help="index of this engine (default: 0)",
    )
    parser.add_argument(
        "--headless",
        action="store_true",
        help="say that it was started apart from any front end, which then must expect that",
    )
    parser.add_argument(
        "--owner-fd",
        type=int,
        metavar="FD",
        help="descriptor of a pipe whose end ends this process; 0 is standard input",
    )
    add_engine_arguments(parser)
    return parser


def _make_proc(options: argparse.Namespace) -> EngineCoreProc:
    return EngineCoreProc(
        config_from_arguments(options),
        make_executor,
        handshake_address=_handshake_address(options),
        identity=EngineIdentity(
            engine_index=options.data_parallel_rank,
            local=not options.headless,
            headless=options.headless,
        ),
        owner_descriptor=options.owner_fd,
        owns_process=True,
    )


def _handshake_address(options: argparse.Namespace) -> str:
    if options.handshake_address is not None:
        return str(options.handshake_address)
    if options.data_parallel_address is None or options.data_parallel_rpc_port is None:
        raise ConfigError(
            "--handshake-address is missing, and so is one of --data-parallel-address and"
            " --data-parallel-rpc-port"
        )
    host = options.data_parallel_address
    return f"tcp://{f'[{host}]' if ':' in host else host}:{options.data_parallel_rpc_port}"


def run_proc(proc: EngineCoreProc) -> ExitStatus:
    """Runs an engine that owns this process, signals and all. Returns the exit status.

    Does not return when the engine's owner is gone, or a thread goes on that nobody waits for.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _note_signals_for(proc)
    try:
        status = _run(proc)
    finally:
        # The interpreter puts back the system's handlers before it has ended, which takes a while:
        # one more signal then would make an orderly end look like a kill.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    if proc.shutdown.owner_is_gone or proc.has_abandoned_threads:
        # An interpreter with torch in it takes a second to end: too long for "gone within 2 s".
        # And it ends threads in a way that a library's may turn into a crash.
        logging.shutdown()
        os._exit(status)
    return status


def _run(proc: EngineCoreProc) -> ExitStatus:
    try:
        trio.run(proc.run)
    except EngineStartError as error:
        log_start_up_failure(error)
        return ExitStatus.START_UP_FAILED
    except EngineDeadError:
        return ExitStatus.CRASHED
    return ExitStatus.STOPPED


def _note_signals_for(proc: EngineCoreProc) -> None:
    """Handlers for the moments around Trio's own: before it a signal counts, after it no more."""

    def note(number: int, _frame: FrameType | None) -> None:
        proc.shutdown.early_signals.append(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        signal.signal(number, note)
