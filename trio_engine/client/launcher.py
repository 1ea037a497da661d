"""Engines to be in front of: one that this process spawns and ends, or one started elsewhere.

Puts the parts together; each knows its own clean-up, and the order of the blocks is the order
of the end: client, process, tasks, sockets.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from trio_engine.client.front_end import open_front_end
from trio_engine.client.process import open_engine_process
from trio_engine.client.service_tasks import open_service_tasks
from trio_engine.client.supervision import (
    explain_lost_connection,
    explain_process_death,
    wait_connected_ready,
    wait_process_ready,
    watch_connections,
    watch_process,
)
from trio_engine.client.tokenizer_load import TokenizerLoad
from trio_engine.client.wire_client import open_wire_client
from trio_engine.config import EngineConfig
from trio_engine.engine_arguments import config_to_arguments
from trio_engine.errors import EngineStartError
from trio_engine.text.processor import TextProcessor
from trio_engine.transport.addresses import check_target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from trio_engine.client.base import EngineClient
    from trio_engine.text.tokenizer import Tokenizer
    from trio_engine.wire.messages import ReadyResponse

DEFAULT_START_TIMEOUT_S = 300.0
"""Loading a large model from a cold disk takes minutes; a start that hangs must still end."""

INTERPRETER_EXIT_S = 2.0
"""What an engine may take beyond its own time limits to be gone: leaving an interpreter with
torch loaded takes about 1 s."""


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

    An error of the body leaves as it was raised, and a dead engine does not cancel the body. The
    process ends with this one, however that ends; its output goes to ``trio_engine.engine``.

    An engine that hangs cannot be told from a slow one: what waits for it goes on waiting, under
    whatever deadline its caller set, and leaving the block ends it all the same.

    Args:
        config: what to run; the built-in model if not given.
        tokenizer: "auto" loads the model's if the executor runs one. With None prompts are
            token ids and outputs have no text.
        max_in_flight: requests that may be open at once; beyond it ``OverloadedError``.
        command: instead of this interpreter's ``-m trio_engine.engine``; flags are appended.
        env: environment of the process; None is this one's.
        start_timeout_s: until the engine is ready, loading included.
        terminate_timeout_s: from SIGTERM to SIGKILL; None is what ``config`` lets it take.

    Raises:
        EngineStartError: it ended before it was ready, broke the protocol, or took too long.
        ModelError: its tokenizer cannot be loaded.
        ConfigError: no directory can hold its sockets.

    Cancellation: at any point ends the process first, within ``terminate_timeout_s`` and seconds.

    Example::

        async with open_engine(EngineConfig(max_num_seqs=8)) as engine:
            output = await engine.complete("The capital of France is")
    """
    config = config or EngineConfig()
    if terminate_timeout_s is None:
        terminate_timeout_s = _orderly_end_s(config)
    async with open_front_end() as front_end, open_service_tasks() as tasks:
        tasks.start_soon(front_end.connections.run)
        load = _tokenizer_load(config, tokenizer)
        tasks.start_soon(load.run)
        async with open_engine_process(
            _command_line(command, front_end.handshake_address, config),
            env=env,
            terminate_timeout_s=terminate_timeout_s,
            tasks=tasks,
        ) as process:
            engines = await wait_process_ready(front_end, process, load, tasks, start_timeout_s)
            async with open_wire_client(
                front_end,
                engines,
                _text_processor(engines, await load.wait_loaded()),
                max_in_flight=max_in_flight,
                explain_death=partial(explain_process_death, process),
                tasks=tasks,
            ) as client:
                tasks.start_soon(watch_process, process, client)
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
    engine run; it does not take a new front end. An engine that ends, in whatever way, or whose
    connection is lost, is dead to this client within 2 s.

    Args:
        handshake_address: ``tcp://host:port`` of this machine as engines see it, or ``ipc://``.
        tokenizer: of its model, else prompts are token ids and outputs have no text.
        max_in_flight: requests that may be open at once; beyond it ``OverloadedError``.
        start_timeout_s: until the engine is ready.

    Raises:
        EngineStartError: no engine was ready in time, or it left before, or broke the protocol.
        ConfigError: the address is malformed, taken, or names no host or no port.

    Cancellation: closes the sockets; the engine is not told.
    """
    check_target(handshake_address)  # an engine elsewhere has to be told it
    async with open_front_end(handshake_address) as front_end, open_service_tasks() as tasks:
        tasks.start_soon(front_end.connections.run)
        engines = await wait_connected_ready(front_end, tasks, start_timeout_s)
        async with open_wire_client(
            front_end,
            engines,
            _text_processor(engines, tokenizer),
            max_in_flight=max_in_flight,
            explain_death=explain_lost_connection,
            tasks=tasks,
        ) as client:
            tasks.start_soon(watch_connections, front_end, client)
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


def _tokenizer_load(
    config: EngineConfig, tokenizer: Tokenizer | Literal["auto"] | None
) -> TokenizerLoad:
    if tokenizer == "auto":
        return TokenizerLoad(config.tokenizer_model)
    return TokenizerLoad(None, tokenizer)


def _text_processor(
    engines: Mapping[int, ReadyResponse | None], tokenizer: Tokenizer | None
) -> TextProcessor:
    known = [response.max_model_len for response in engines.values() if response is not None]
    if not known:
        raise EngineStartError("no engine announced its max_model_len")
    return TextProcessor(tokenizer, max_model_len=min(known))
