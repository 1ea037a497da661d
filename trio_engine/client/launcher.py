"""Engines to be in front of: one that this process spawns and ends, or one started elsewhere.

Puts the parts together; each knows its own clean-up, and the order of the blocks is the order
of the end: client, process, tasks, sockets.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

import trio

from trio_engine.client.async_client import open_client
from trio_engine.client.front_end import open_front_end
from trio_engine.client.process import open_engine_process
from trio_engine.client.service_tasks import open_service_tasks
from trio_engine.client.tokenizer_load import TokenizerLoad
from trio_engine.config import EngineConfig
from trio_engine.engine_arguments import config_to_arguments
from trio_engine.errors import EngineDeadError, EngineStartError
from trio_engine.text.processor import TextProcessor
from trio_engine.wire.handshake import ExpectedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from trio_engine.client.async_client import AsyncEngineClient
    from trio_engine.client.base import EngineClient
    from trio_engine.client.front_end import FrontEnd
    from trio_engine.client.process import EngineProcess
    from trio_engine.client.service_tasks import ServiceTasks
    from trio_engine.text.tokenizer import Tokenizer
    from trio_engine.wire.messages import ReadyResponse

DEFAULT_START_TIMEOUT_S = 300.0
"""Loading a large model from a cold disk takes minutes; a start that hangs must still end."""

INTERPRETER_EXIT_S = 2.0
"""What an engine may take beyond its own time limits to be gone: leaving an interpreter with
torch loaded takes about 1 s."""

EXIT_STATUS_WAIT_S = 1.0
"""How long the news of a death waits for the process to end, to carry its exit status. Waiters
are promised the news within 2 s."""

LAST_OUTPUTS_S = 0.1
"""Between a process's end and the news of it: what it sent last is in the socket's buffer, and
ZeroMQ's thread hands it on within a few ms."""


@asynccontextmanager
async def open_engine(
    config: EngineConfig | None = None,
    *,
    tokenizer: Tokenizer | Literal["auto"] | None = "auto",
    max_in_flight: int | None = None,
    command: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
    terminate_timeout_s: float | None = None,
) -> AsyncIterator[EngineClient]:
    """Runs an engine in a process of its own for as long as the block.

    An error of the body leaves as it was raised, never in a group, and an engine that dies does
    not cancel the body: whoever uses it gets ``EngineDeadError``. The process ends with this one,
    however that ends. Its output goes to the logger ``trio_engine.engine``.

    Args:
        config: what to run; the built-in model if not given.
        tokenizer: "auto" loads the model's, or none for an executor that runs no model. With
            None prompts are token ids and outputs have no text.
        max_in_flight: requests that may be open at once; beyond it ``OverloadedError``.
        command: in place of this interpreter with ``-m trio_engine.engine``; the engine's flags
            are appended.
        env: environment of the process; None is this one's.
        start_timeout_s: until the engine is ready, loading included.
        terminate_timeout_s: from SIGTERM to SIGKILL when the block is left. None is what the
            config allows an orderly end to take.

    Raises:
        EngineStartError: it ended before it was ready, broke the protocol, or took too long.
        ModelError: its tokenizer cannot be loaded.
        ConfigError: no directory can hold its sockets.

    Cancellation: at any point ends the process before it goes on, which takes
    ``terminate_timeout_s`` and some seconds at most.

    Example::

        async with open_engine(EngineConfig(max_num_seqs=8)) as engine:
            output = await engine.complete("The capital of France is")

    Counterpart: ``vllm/v1/engine/utils.py`` ``launch_core_engines``, which waits for the
    handshake without a limit and leaves the clean-up to finalizers.
    """
    config = config or EngineConfig()
    if terminate_timeout_s is None:
        terminate_timeout_s = _orderly_end_s(config)
    async with open_front_end() as front_end, open_service_tasks() as tasks:
        load = TokenizerLoad(_model_to_tokenize(config, tokenizer))
        tasks.start_soon(load.run)
        async with open_engine_process(
            _command_line(command, front_end.handshake_address, config),
            env=env,
            terminate_timeout_s=terminate_timeout_s,
            tasks=tasks,
        ) as process:
            engines = await _start_process(front_end, process, tasks, start_timeout_s)
            loaded = await load.wait_loaded() if tokenizer == "auto" else tokenizer
            async with open_client(
                front_end,
                engines,
                _text_processor(engines, loaded),
                max_in_flight=max_in_flight,
                explain_death=lambda noticed: _await_death(process, noticed),
                tasks=tasks,
            ) as client:
                tasks.start_soon(_watch_process, process, client)
                yield client


@asynccontextmanager
async def connect_engine(
    handshake_address: str,
    *,
    tokenizer: Tokenizer | None = None,
    max_in_flight: int | None = None,
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
) -> AsyncIterator[EngineClient]:
    """Is the front end of an engine that was started elsewhere, for as long as the block.

    Binds the address and waits for the engine to say HELLO; it may have been started before or
    after. Ours (``trio-engine engine --handshake-address ...``) and vLLM's
    (``vllm serve MODEL --headless ...``) both do. Leaving aborts what is open there and lets the
    engine run; it does not take a new front end. That an engine has gone without a word shows
    at the next message to it.

    Args:
        handshake_address: ``tcp://host:port`` of this machine as engines see it, or ``ipc://``.
        tokenizer: of its model, else prompts are token ids and outputs have no text.
        max_in_flight: requests that may be open at once; beyond it ``OverloadedError``.
        start_timeout_s: until the engine is ready.

    Raises:
        EngineStartError: no engine was ready in time, or it broke the protocol.
        ConfigError: the address is malformed, taken, or names no host.

    Cancellation: closes the sockets; the engine is not told.
    """
    async with open_front_end(handshake_address) as front_end, open_service_tasks() as tasks:
        expected = [ExpectedEngine(0, local=False)]
        with trio.move_on_after(start_timeout_s) as scope:
            engines = await front_end.wait_engines_ready(expected)
        if scope.cancelled_caught:
            raise EngineStartError(_too_late(front_end, start_timeout_s))
        async with open_client(
            front_end,
            engines,
            _text_processor(engines, tokenizer),
            max_in_flight=max_in_flight,
            explain_death=_explain_without_process,
            tasks=tasks,
        ) as client:
            yield client


def _command_line(
    command: Sequence[str] | None, handshake_address: str, config: EngineConfig
) -> list[str]:
    return [
        *(command or (sys.executable, "-m", "trio_engine.engine")),
        *("--handshake-address", handshake_address),
        *("--owner-fd", "0"),
        *config_to_arguments(config),
    ]


def _orderly_end_s(config: EngineConfig) -> float:
    own_limits_s = config.shutdown_timeout_s + config.exit_grace_s + config.flush_timeout_s
    return own_limits_s + INTERPRETER_EXIT_S


def _model_to_tokenize(config: EngineConfig, tokenizer: object) -> str | None:
    return config.model if tokenizer == "auto" and config.executor == "torch" else None


def _text_processor(
    engines: Mapping[int, ReadyResponse | None], tokenizer: Tokenizer | None
) -> TextProcessor:
    known = [response.max_model_len for response in engines.values() if response is not None]
    if not known:
        raise EngineStartError("no engine announced its max_model_len")
    return TextProcessor(tokenizer, max_model_len=min(known))


async def _start_process(
    front_end: FrontEnd, process: EngineProcess, tasks: ServiceTasks, start_timeout_s: float
) -> dict[int, ReadyResponse | None]:
    with trio.move_on_after(start_timeout_s) as scope:
        tasks.start_soon(_cancel_at_exit, process, scope)
        try:
            return await front_end.wait_engines_ready([ExpectedEngine(0, local=True)])
        except EngineStartError as broken:
            broken.stderr_tail = process.stderr_tail
            _note_output(broken, process)
            raise
    if process.exit_status is None:
        message = _too_late(front_end, start_timeout_s)
    else:
        message = f"the engine process ended before it was ready: {process.describe_exit()}"
    error = EngineStartError(
        message, exit_status=process.exit_status, stderr_tail=process.stderr_tail
    )
    _note_output(error, process)
    raise error


async def _cancel_at_exit(process: EngineProcess, scope: trio.CancelScope) -> None:
    await process.wait()
    scope.cancel("the engine process ended")


def _too_late(front_end: FrontEnd, start_timeout_s: float) -> str:
    missing = ", ".join(front_end.missing())
    return f"no engine was ready within {start_timeout_s:g} s (start_timeout_s); missing: {missing}"


async def _watch_process(process: EngineProcess, client: AsyncEngineClient) -> None:
    await process.wait()
    await trio.sleep(LAST_OUTPUTS_S)
    client.die(_death_of(process, "its process ended"))


async def _await_death(process: EngineProcess, noticed: str) -> EngineDeadError:
    with trio.move_on_after(EXIT_STATUS_WAIT_S):
        await process.wait()
    return _death_of(process, noticed)


async def _explain_without_process(noticed: str) -> EngineDeadError:
    return EngineDeadError(f"the engine died: {noticed}")


def _death_of(process: EngineProcess, noticed: str) -> EngineDeadError:
    error = EngineDeadError(
        f"the engine died: {noticed} ({process.describe_exit()})",
        exit_status=process.exit_status,
        stderr_tail=process.stderr_tail,
    )
    _note_output(error, process)
    return error


def _note_output(error: Exception, process: EngineProcess) -> None:
    """The child's last lines stand below a printed traceback, where one looks for a cause."""
    if process.stderr_tail:
        error.add_note(f"The end of the engine's output:\n{process.stderr_tail}")
