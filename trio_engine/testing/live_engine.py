"""A running engine process of any make, in front of which a check plays the front end.

Public kit. Imports neither torch nor pytest. For ``check_engine``.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from trio_engine.client.engine_command import fill_in, uses_port
from trio_engine.client.process import EngineProcess, open_engine_process
from trio_engine.client.service_tasks import ServiceTasks, open_service_tasks
from trio_engine.errors import ConfigError
from trio_engine.testing.wire_front_end import WireFrontEnd
from trio_engine.wire.handshake import ExpectedEngine

if TYPE_CHECKING:
    import signal
    from collections.abc import AsyncIterator

    from trio_engine.testing.core_driver import RequestLog

NUM_CLIENTS = 2
NUM_TOKENS = 12
PROMPT = [5, 6, 7]


class EngineUnderCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine, and what it is given time for.

    Attributes:
        command: with ``{handshake}`` where the front end's handshake address belongs, or
            ``{port}`` for the port of it on 127.0.0.1.
        is_headless: whether it says that somebody else started it.
        start_limit_s: from its start to READY, loading included.
        answer_limit_s: for whatever it is asked.
        exit_limit_s: from the request to stop to the end of the process.

    Raises:
        ConfigError: a limit is not above 0.
    """

    command: list[str]
    is_headless: bool = False
    start_limit_s: float = 300.0
    answer_limit_s: float = 5.0
    exit_limit_s: float = 3.0

    def __post_init__(self) -> None:
        for name in ("start_limit_s", "answer_limit_s", "exit_limit_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


class LiveEngine:
    """One life of an engine process. Made by ``open_live_engine``.

    Attributes:
        front_end: to talk to it.
        process: itself.
        solo_token_ids: what it answers to ``PROMPT`` when nothing else runs.
    """

    def __init__(
        self,
        under_check: EngineUnderCheck,
        front_end: WireFrontEnd,
        process: EngineProcess,
        tasks: ServiceTasks,
    ) -> None:
        self.front_end = front_end
        self.process = process
        self.solo_token_ids: list[int] = []
        self.under_check = under_check
        self._tasks = tasks
        self._num_ids = 0

    @property
    def max_model_len(self) -> int:
        """As announced."""
        response = self.front_end.ready_response
        assert response is not None, "the ready response is empty"
        return response.max_model_len

    def new_id(self) -> str:
        """A request id that was not used before."""
        self._num_ids += 1
        return f"request-{self._num_ids}"

    async def start_up(self) -> None:
        """Waits until it is ready.

        Raises:
            AssertionError: it ended before.
            trio.TooSlowError: it takes longer than it may.
            ProtocolError: it does not speak the protocol.
        """
        with trio.fail_after(self.under_check.start_limit_s) as scope:
            self.cancel_at_exit(scope)
            await self.front_end.start_up()
            return
        raise AssertionError("it ended before it was ready")

    async def greet_only(self) -> None:
        """Waits for its HELLO, which nobody answers. Raises as ``start_up``."""
        with trio.fail_after(self.under_check.start_limit_s) as scope:
            self.cancel_at_exit(scope)
            await self.front_end.receive_handshake()
            return
        raise AssertionError("it ended before HELLO")

    async def calibrate(self) -> None:
        """Notes what it answers when nothing else runs, the first two messages of front ends."""
        for method in ("reset_mm_cache", "get_supported_tasks"):
            answer = await self.front_end.call_utility(method)
            assert answer.failure_message is None, answer.failure_message
        self.solo_token_ids = (await self.complete(PROMPT)).token_ids

    async def complete(
        self, prompt: list[int], *, max_tokens: int = NUM_TOKENS, client: int = 0
    ) -> RequestLog:
        """Asks for a short answer and reads it to its end."""
        request_id = self.new_id()
        await self.front_end.add(
            request_id, prompt, client=client, max_tokens=max_tokens, ignore_eos=True
        )
        return await self.front_end.finish(request_id, client=client)

    async def wait_exit(self) -> int:
        """Its exit status.

        Raises:
            AssertionError: it runs on for longer than it may.
        """
        with trio.move_on_after(self.under_check.exit_limit_s):
            await self.process.wait()
        status = self.process.exit_status
        assert status is not None, f"it still runs after {self.under_check.exit_limit_s:g} s"
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        if self.process.exit_status is None:
            os.kill(self.process.pid, number)

    def cancel_at_exit(self, scope: trio.CancelScope) -> None:
        """Ends a wait for something that an ended process will not do."""
        self._tasks.start_soon(_cancel_at_exit, self.process, scope)

    def describe_end(self) -> str:
        """How the process ended and its last line, or that it runs."""
        if self.process.exit_status is None:
            return ""
        last_line = self.process.last_line
        return f"it has ended ({self.process.describe_exit()}): {last_line:.200}"


async def _cancel_at_exit(process: EngineProcess, scope: trio.CancelScope) -> None:
    await process.wait()
    scope.cancel("the engine process has ended")


@asynccontextmanager
async def open_live_engine(under_check: EngineUnderCheck) -> AsyncIterator[LiveEngine]:
    """Spawns an engine, which has said nothing yet; kills it at the end if it still runs."""
    expected = ExpectedEngine(0, local=not under_check.is_headless)
    async with (
        WireFrontEnd(
            NUM_CLIENTS,
            engine=expected,
            host="127.0.0.1" if uses_port(under_check.command) else None,
        ) as front_end,
        open_service_tasks() as tasks,
        open_engine_process(
            fill_in(under_check.command, front_end.handshake_address),
            env=None,
            terminate_timeout_s=0.0,
            tasks=tasks,
        ) as process,
    ):
        yield LiveEngine(under_check, front_end, process, tasks)
