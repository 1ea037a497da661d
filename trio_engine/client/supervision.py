"""What becomes of a client when its engine ends: while it starts, and later.

Between ``process``, which knows no engine, and the client, which knows no process. Of an engine
that was started elsewhere there are only ``connections`` to watch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trio_engine.errors import EngineDeadError, EngineStartError
from trio_engine.observability.logs import parse_start_up_failure
from trio_engine.wire.handshake import ExpectedEngine

if TYPE_CHECKING:
    from trio_engine.client.async_client import AsyncEngineClient
    from trio_engine.client.front_end import FrontEnd
    from trio_engine.client.process import EngineProcess
    from trio_engine.client.service_tasks import ServiceTasks
    from trio_engine.client.tokenizer_load import TokenizerLoad
    from trio_engine.wire.messages import ReadyResponse

EXIT_STATUS_WAIT_S = 1.0
"""How long the news of a death waits for the process to end, to carry its exit status. Waiters
are promised the news within 2 s."""

LAST_OUTPUTS_S = 0.1
"""Between a process's end and the news of it: what it sent last is in the socket's buffer, and
ZeroMQ's thread hands it on within a few ms."""

SPAWNED_ENGINE = ExpectedEngine(0, local=True)
"""What an engine says of itself that its front end has spawned."""


async def wait_process_ready(
    front_end: FrontEnd,
    process: EngineProcess,
    load: TokenizerLoad,
    tasks: ServiceTasks,
    start_timeout_s: float,
    expected: ExpectedEngine = SPAWNED_ENGINE,
) -> dict[int, ReadyResponse | None]:
    """Brings up the engine that was just spawned, and waits for its tokenizer beside it.

    Returns:
        What it announced, by its index.

    Raises:
        EngineStartError: it ended (noticed at once), broke the protocol, or took too long.
        ModelError: the tokenizer cannot be loaded.
    """
    with trio.move_on_after(start_timeout_s) as scope:
        tasks.start_soon(_cancel_at_exit, process, scope)
        try:
            engines = await front_end.wait_engines_ready([expected])
            await load.wait_loaded()
            return engines
        except EngineStartError as broken:
            broken.stderr_tail = process.stderr_tail
            _note_output(broken, process)
            raise
    if process.exit_status is None:
        message = front_end.describe_timeout(start_timeout_s)
    else:
        # Another program's last line may be worth little, but it is all that there is.
        reason = parse_start_up_failure(process.stderr_tail) or process.last_line
        reason = reason or "it did not say why"
        message = f"the engine did not start ({process.describe_exit()}): {reason}"
    error = EngineStartError(
        message, exit_status=process.exit_status, stderr_tail=process.stderr_tail
    )
    _note_output(error, process)
    raise error


async def wait_connected_ready(
    front_end: FrontEnd, tasks: ServiceTasks, start_timeout_s: float
) -> dict[int, ReadyResponse | None]:
    """Waits for an engine that somebody else starts, and brings it up.

    Returns:
        What it announced, by its index.

    Raises:
        EngineStartError: it left before it was ready, broke the protocol, or took too long.
    """
    with trio.move_on_after(start_timeout_s) as scope:
        tasks.start_soon(_cancel_if_it_leaves, front_end, scope)
        return await front_end.wait_engines_ready([ExpectedEngine(0, local=False)])
    if trio.current_time() < scope.deadline:
        raise EngineStartError("the engine said HELLO and left before it was ready: see its log")
    raise EngineStartError(front_end.describe_timeout(start_timeout_s))


async def watch_process(process: EngineProcess, client: AsyncEngineClient) -> None:
    """Tells the client when the process has ended. A task of whoever made both."""
    await process.wait()
    await trio.sleep(LAST_OUTPUTS_S)
    client.die(_death_of(process, "its process ended"))


async def explain_process_death(process: EngineProcess, noticed: str) -> EngineDeadError:
    """What a client that noticed a death raises: with the exit status, if that comes soon."""
    with trio.move_on_after(EXIT_STATUS_WAIT_S):
        await process.wait()
    return _death_of(process, noticed)


async def watch_connections(front_end: FrontEnd, client: AsyncEngineClient) -> None:
    """Tells the client when the engine has left. A task of whoever made both."""
    await front_end.connections.wait_left()
    await client.notice_death("it has closed its connection without a word, killed or stopped")


async def explain_lost_connection(noticed: str) -> EngineDeadError:
    """What a client raises of an engine of which nobody can say how it ended."""
    return EngineDeadError(f"the engine is gone: {noticed}")


async def _cancel_if_it_leaves(front_end: FrontEnd, scope: trio.CancelScope) -> None:
    if await front_end.connections.wait_left_start_up():
        scope.cancel("the engine left before it was ready")


async def _cancel_at_exit(process: EngineProcess, scope: trio.CancelScope) -> None:
    await process.wait()
    scope.cancel("the engine process ended")


def _death_of(process: EngineProcess, noticed: str) -> EngineDeadError:
    happened = "was asked to stop" if process.exit_status == 0 else f"died: {noticed}"
    error = EngineDeadError(
        f"the engine {happened} ({process.describe_exit()})",
        exit_status=process.exit_status,
        stderr_tail=process.stderr_tail,
    )
    _note_output(error, process)
    return error


def _note_output(error: Exception, process: EngineProcess) -> None:
    """The child's last lines stand below a printed traceback, where one looks for a cause."""
    if process.stderr_tail:
        error.add_note(f"The end of the engine's output:\n{process.stderr_tail}")
