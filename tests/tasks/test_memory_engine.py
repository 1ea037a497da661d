"""A whole engine in memory: messages by hand, held up, cut off; plans run where the test says."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import CONFIG, PROMPT, TEST_TIMEOUT_S
from trio_engine.errors import EngineDeadError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason
from trio_engine.testing.memory_client import MemoryClient
from trio_engine.testing.memory_engine import MemoryEngine
from trio_engine.testing.promises import Promises
from trio_engine.testing.requests import make_request, run_alone
from trio_engine.wire.messages import AbortRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.requests import EngineCoreRequest
    from trio_engine.testing.core_driver import RequestLog
    from trio_engine.testing.promises import Life

DRAINING = msgspec.structs.replace(CONFIG, shutdown_timeout_s=30.0)


class Rig:
    """An engine that has started, and two clients with one set of books."""

    def __init__(self) -> None:
        executor = KVCheckingExecutor(DRAINING)
        self.engine = MemoryEngine(DRAINING, executor, num_clients=2)
        self.promises = Promises(self._run_alone)
        self.clients = [MemoryClient(index, self.engine, self.promises) for index in range(2)]
        self.death: EngineDeadError | None = None

    async def run(self) -> None:
        try:
            await self.engine.run()
        except EngineDeadError as error:
            self.death = error

    def add(self, request_id: str, *, client: int = 0, max_tokens: int = 2) -> Life:
        request = make_request(request_id, PROMPT, client=client, max_tokens=max_tokens)
        life = self.promises.begin(request)
        self.clients[client].send(request)
        return life

    async def settle(self) -> None:
        """Plans run and clients read until nothing is left."""
        await wait_all_tasks_blocked()
        while self.engine.forward.has_work or any(client.has_mail for client in self.clients):
            if self.engine.forward.has_work:
                self.engine.forward.serve()
            for client in self.clients:
                client.read()
            await wait_all_tasks_blocked()

    def _run_alone(self, request: EngineCoreRequest) -> RequestLog:
        return run_alone(request, max_model_len=self.engine.core.max_model_len)


@asynccontextmanager
async def open_rig() -> AsyncIterator[Rig]:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            rig = Rig()
            nursery.start_soon(rig.run)
            await wait_all_tasks_blocked()
            yield rig
            nursery.cancel_scope.cancel()


async def test_requests_of_two_clients_are_served(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        lives = [rig.add("same", client=0), rig.add("same", client=1, max_tokens=5)]
        await rig.settle()
        assert [life.log.finish_reason for life in lives] == [FinishReason.LENGTH] * 2
        rig.promises.check_tokens_equal_a_solo_run()
        rig.promises.check_every_life_is_over()
        assert not rig.clients[0].strays


async def test_messages_that_were_held_up_arrive_together_and_in_order() -> None:
    async with open_rig() as rig:
        rig.engine.inputs[0].is_held_up = True
        life = rig.add("a")
        rig.clients[0].send(AbortRequest(["a"]))
        life.awaits_abort = True
        await rig.settle()
        assert not life.is_told
        assert rig.engine.inputs[0].num_held_up == 2
        rig.engine.inputs[0].let_through()
        await rig.settle()
        assert life.is_told
        assert not life.log.outputs


@pytest.mark.parametrize("is_input", [True, False])
async def test_a_link_that_breaks_ends_the_engine_and_the_other_client_is_told(
    is_input: bool,
) -> None:
    async with open_rig() as rig:
        rig.add("a", client=0)
        links = rig.engine.inputs if is_input else rig.engine.outputs
        links[0].break_off()
        await rig.settle()
        assert isinstance(rig.death, EngineDeadError)
        assert rig.clients[1].is_told_dead


async def test_a_link_that_breaks_in_the_last_flush_does_not_make_a_stop_a_crash(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_rig() as rig:
        rig.clients[0].is_reading = False
        for _ in range(3):  # one is taken in, one is being sent, one waits
            rig.clients[0].call("is_sleeping", [])
            await wait_all_tasks_blocked()
        life = rig.add("a", client=1)
        rig.engine.proc.shutdown.request("asked to")
        await rig.settle()
        assert life.is_over
        rig.engine.outputs[0].break_off()
        await wait_all_tasks_blocked()
        assert rig.death is None
        assert not rig.clients[1].is_told_dead
    assert "outputs_lost client=0" in caplog.text
