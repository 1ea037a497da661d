"""An engine process under load: started by any command, with bare sockets in front of it.

The sockets and the start-up are the client's; what it does with requests and answers is left out,
so that the load costs as little as it can beside the engine that it measures.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trio_engine.client.engine_command import fill_in, uses_port
from trio_engine.client.front_end import open_front_end
from trio_engine.client.process import open_engine_process
from trio_engine.client.service_tasks import open_service_tasks
from trio_engine.client.supervision import wait_process_ready
from trio_engine.client.tokenizer_load import TokenizerLoad
from trio_engine.core.statistics import EngineCoreStatistics, StepStatistics
from trio_engine.errors import EngineDeadError, EngineStartError, UtilityError
from trio_engine.wire.codec import OutputsDecoder, RequestEncoder, is_engine_core_dead
from trio_engine.wire.handshake import ExpectedEngine, engine_identity
from trio_engine.wire.messages import UtilityCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from trio_engine.client.front_end import FrontEnd
    from trio_engine.client.process import EngineProcess
    from trio_engine.wire.messages import Buffer, Frames

START_TIMEOUT_S = 600.0
"""A real model from a cold disk and a peer that compiles take minutes; a hang must still end."""

DEFAULT_STALL_TIMEOUT_S = 300.0
"""Between two answers lies the prefill of what waits, which is minutes for long prompts on a CPU;
an engine that hangs must still end."""

STATISTICS_TIMEOUT_S = 5.0
"""An engine without work answers a call at once; one that never does has no statistics to give."""

TERMINATE_TIMEOUT_S = 10.0
"""From SIGTERM to SIGKILL, for engines of any make."""

ENGINE_INDEX = 0
ANY_HOST_PORT = "tcp://127.0.0.1:0"

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float:
    """Processor time of a process and of all that it started, those that have ended included.

    The ended ones count with whoever has waited for them. What left the tree, since the process
    between has ended, is not counted any more. Linux only, in steps of 10 ms for each.

    Raises:
        ProcessLookupError: there is no such process.
    """
    return _tree_ticks(pid) / _TICKS_PER_S


def _tree_ticks(pid: int) -> int:
    ticks = 0
    for child in _children_of(pid):
        with suppress(ProcessLookupError):  # ended since: its ticks are its parent's in a moment
            ticks += _tree_ticks(child)
    # The parent last: a child that ends in between is rather counted twice than lost.
    return ticks + sum(_ticks_of(pid))


def _ticks_of(pid: int) -> tuple[int, ...]:
    """User and system time of a process, then of its children that it has waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    return tuple(int(field) for field in text.rpartition(")")[2].split()[11:15])


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError):  # the process has ended since
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # or this thread
                children = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found.extend(map(int, children.split()))
    return found


class BenchEngine:
    """A running engine and the way to it. Made by ``open_bench_engine``.

    Attributes:
        max_model_len: as it announced.
        start_s: from its start until it was ready.
        stall_timeout_s: how long it may be silent while it has requests.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        process: EngineProcess,
        *,
        max_model_len: int,
        start_s: float,
        stall_timeout_s: float,
    ) -> None:
        self.max_model_len = max_model_len
        self.start_s = start_s
        self.stall_timeout_s = stall_timeout_s
        self._front_end = front_end
        self._process = process
        self._identity = engine_identity(ENGINE_INDEX)
        self._encoder = RequestEncoder()
        self._decoder = OutputsDecoder()
        self._call_ids = count(1)
        self._runs = count()
        self._has_statistics = True

    def next_run(self) -> int:
        """Numbers the loads of this engine."""
        return next(self._runs)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Sends a message at once: a ROUTER's queue has no limit.

        Raises:
            EngineDeadError: it has left.
        """
        try:
            self._front_end.input.send_nowait([self._identity, *frames])
        except trio.BrokenResourceError as error:
            raise EngineDeadError(f"the engine has left ({self.describe_exit()})") from error

    async def receive_many(self, limit: int) -> list[Frames]:
        """Waits for outputs, then takes what has come.

        Raises:
            EngineDeadError: it says that it is dead.
        """
        messages = await self._front_end.output.receive_many(limit)
        if is_engine_core_dead(messages[-1]):
            raise EngineDeadError("the engine sent ENGINE_CORE_DEAD")
        return messages

    async def step_statistics(self) -> StepStatistics | None:
        """Where the time of its steps went; None from an engine that does not tell.

        Only while no request is open: outputs that come meanwhile are dropped.

        Raises:
            EngineDeadError: it has left.
        """
        if not self._has_statistics:
            return None
        answer: Any = None
        async with open_service_tasks() as tasks:
            with trio.move_on_after(STATISTICS_TIMEOUT_S) as scope, suppress(UtilityError):
                tasks.start_soon(self.cancel_when_gone, scope)
                answer = await self._call("get_statistics")
        if self._process.exit_status is not None:
            raise self.death()
        if answer is None:
            self._has_statistics = False
            return None
        return msgspec.convert(answer, EngineCoreStatistics).steps

    async def _call(self, method: str) -> Any:
        call_id = next(self._call_ids)
        self.send(self._encoder.encode(UtilityCall(0, call_id, method, [])))
        while True:
            for frames in await self.receive_many(1):
                output = self._decoder.decode(frames).utility_output
                if output is None or output.call_id != call_id:
                    continue
                if output.result is None:
                    raise UtilityError(output.failure_message or "no result")
                return output.result.value

    def cpu_s(self) -> float:
        """``process_cpu_s`` of its process: many engines work in processes below the one started.

        Raises:
            EngineDeadError: it has left.
        """
        try:
            return process_cpu_s(self._process.pid)
        except ProcessLookupError as error:
            raise self.death() from error

    def death(self) -> EngineDeadError:
        """What is raised of an engine that does not answer any more, whatever the reason."""
        if self._process.exit_status is None:
            return EngineDeadError(
                f"the engine runs, but gave no answer for {self.stall_timeout_s:g} s"
                " (--stall-timeout)"
            )
        return EngineDeadError(f"the engine has left ({self.describe_exit()})")

    def describe_exit(self) -> str:
        """How it ended and its last line, or that it still runs."""
        return f"{self._process.describe_exit()}: {self._process.last_line:.200}"

    async def cancel_when_gone(self, scope: trio.CancelScope) -> None:
        """Waits for its end, and then ends a wait for something that it will not do."""
        await self._process.wait()
        scope.cancel("the engine has left")


@asynccontextmanager
async def open_bench_engine(
    command: Sequence[str],
    *,
    is_headless: bool = False,
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
) -> AsyncIterator[BenchEngine]:
    """Runs an engine for as long as the block, ready and with nothing to do.

    Args:
        command: with ``{handshake}`` where an address belongs, or ``{port}``.
        is_headless: whether it says that somebody else started it.
        stall_timeout_s: how long it may be silent while it has requests.

    Raises:
        EngineStartError: it did not get ready.

    Cancellation: ends the process first.
    """
    address = ANY_HOST_PORT if uses_port(command) else None
    start_s = trio.current_time()
    async with open_front_end(address) as front_end, open_service_tasks() as tasks:
        no_tokenizer = TokenizerLoad(None)
        tasks.start_soon(no_tokenizer.run)
        tasks.start_soon(front_end.connections.run)
        async with open_engine_process(
            fill_in(command, front_end.handshake_address),
            env=None,
            terminate_timeout_s=TERMINATE_TIMEOUT_S,
            tasks=tasks,
        ) as process:
            expected = ExpectedEngine(ENGINE_INDEX, local=not is_headless)
            engines = await wait_process_ready(
                front_end, process, no_tokenizer, tasks, START_TIMEOUT_S, expected
            )
            response = engines[ENGINE_INDEX]
            if response is None:
                raise EngineStartError("the engine did not announce its max_model_len")
            took_s = trio.current_time() - start_s
            yield BenchEngine(
                front_end,
                process,
                max_model_len=response.max_model_len,
                start_s=took_s,
                stall_timeout_s=stall_timeout_s,
            )
