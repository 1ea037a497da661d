"""A step loop without a thread: plans settle when the test says so, all on Trio's thread."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import CONFIG
from trio_engine.core.engine_core import EngineCore
from trio_engine.core.plan import DeviceCommand, StepPlan
from trio_engine.engine.doorbell import Doorbell
from trio_engine.engine.forward_thread import (
    Broken,
    CommandDone,
    ForwardEvent,
    ForwardThread,
    StepFailed,
)
from trio_engine.engine.inbox import Arrival
from trio_engine.engine.step_loop import StepLoop
from trio_engine.errors import RequestStepError
from trio_engine.testing.requests import make_request
from trio_engine.testing.scripted_executor import ScriptedExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.config import EngineConfig
    from trio_engine.outputs import EngineCoreOutput, FinishReason, UtilityOutput
    from trio_engine.wire.codec import UndecodableRequest
    from trio_engine.wire.messages import EngineCoreMessage


class HandForward(ForwardThread):
    """In the thread's place: keeps what is submitted until ``settle``."""

    def __init__(self, executor: ScriptedExecutor, doorbell: Doorbell) -> None:
        super().__init__(executor, doorbell.ring)
        self.executor = executor
        self.items: deque[StepPlan | DeviceCommand] = deque()
        self.num_nudges = 0
        self._ring = doorbell.ring

    def submit(self, item: StepPlan | DeviceCommand) -> None:
        self.items.append(item)

    def nudge(self) -> None:
        self.num_nudges += 1

    def come(self, event: ForwardEvent) -> None:
        """An event arrives."""
        self.events.append(event)
        self._ring()

    def settle(self) -> None:
        """Does the oldest item."""
        item = self.items.popleft()
        try:
            if isinstance(item, DeviceCommand):
                self.come(CommandDone(item.command_id, self.executor.command(item)))
            else:
                self.executor.launch(item)
                self.come(self.executor.collect())
        except RequestStepError as error:
            assert isinstance(item, StepPlan)
            self.items.clear()
            self.come(StepFailed(item.plan_id, error))
        except Exception as error:
            if isinstance(item, DeviceCommand):
                self.come(CommandDone(item.command_id, error=error))
            else:
                self.come(Broken(error))


class LoopRig:
    """A loop, its parts, and what its clients were told."""

    def __init__(self, config: EngineConfig, *, num_clients: int, launches_ahead: bool) -> None:
        executor = ScriptedExecutor(config, launches_ahead=launches_ahead)
        doorbell = Doorbell()
        self.forward = HandForward(executor, doorbell)
        self.executor = executor
        self.core = EngineCore(config, executor.load(), num_clients=num_clients, clock=lambda: 1.0)
        self.rung: list[int] = []
        self.loop = StepLoop(
            self.core,
            self.forward,
            pipeline_depth=config.pipeline_depth,
            doorbell=doorbell,
            on_output=self.rung.append,
        )

    def come(self, *messages: EngineCoreMessage | UndecodableRequest, client: int = 0) -> None:
        """Messages arrive by a client's socket."""
        self.loop.inbox.put_nowait([Arrival(client, message) for message in messages])

    def add(self, *request_ids: str, client: int = 0, **params: Any) -> None:
        """ADDs arrive."""
        self.come(
            *(make_request(id_, [1, 2, 3], client=client, **params) for id_ in request_ids),
            client=client,
        )

    async def settle(self, count: int = 1) -> None:
        """So many plans or commands run one after the other, and the loop takes each."""
        for _ in range(count):
            self.forward.settle()
            await wait_all_tasks_blocked()

    async def settle_all(self) -> None:
        """Runs whatever there is, until there is nothing."""
        await wait_all_tasks_blocked()
        while self.forward.items:
            await self.settle()

    def take(self, client: int = 0) -> tuple[list[EngineCoreOutput], list[UtilityOutput]]:
        """What a client was told since the last call: outputs, and answers."""
        messages = self.core.outboxes[client].take(1.0)
        outputs = [output for message in messages for output in message.outputs]
        return outputs, [m.utility_output for m in messages if m.utility_output is not None]

    def take_ends(self, client: int = 0) -> dict[str, FinishReason | None]:
        """The requests that a client was told of since the last call."""
        return {output.request_id: output.finish_reason for output in self.take(client)[0]}


@asynccontextmanager
async def open_loop(
    config: EngineConfig = CONFIG, *, num_clients: int = 2, launches_ahead: bool = False
) -> AsyncIterator[LoopRig]:
    """A running loop; it is cancelled at the end, and its core must be sound then."""
    rig = LoopRig(config, num_clients=num_clients, launches_ahead=launches_ahead)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.loop.run)
        yield rig
        rig.core.check_integrity()
        nursery.cancel_scope.cancel()
