"""A running step loop with its utility calls, and the answers as a test wants them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.loop_parts import LoopRig, open_loop
from trio_engine.engine.utility import UtilityCalls
from trio_engine.wire.messages import UtilityCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.engine.utility import UtilityHandler
    from trio_engine.outputs import UtilityOutput


class CallRig:
    """A running loop with its calls; one call at a time."""

    def __init__(self, rig: LoopRig, nursery: trio.Nursery) -> None:
        self.rig = rig
        self.nursery = nursery
        self._num_calls = 0

    def post(self, method: str, *args: Any) -> int:
        self._num_calls += 1
        self.rig.come(UtilityCall(0, self._num_calls, method, list(args)))
        return self._num_calls

    def answers(self) -> list[UtilityOutput]:
        return self.rig.take()[1]

    async def call(self, method: str, *args: Any) -> UtilityOutput:
        """The answer, which must be there once nothing moves any more."""
        call_id = self.post(method, *args)
        await wait_all_tasks_blocked()
        (answer,) = self.answers()
        assert answer.call_id == call_id
        return answer

    async def value(self, method: str, *args: Any) -> Any:
        answer = await self.call(method, *args)
        assert answer.failure_message is None
        assert answer.result is not None
        assert answer.result.type_info is None
        return answer.result.value

    async def failure(self, method: str, *args: Any) -> str:
        answer = await self.call(method, *args)
        assert answer.result is None
        start = f"Call to {method} method failed: "
        assert answer.failure_message is not None
        assert answer.failure_message.startswith(start)
        return answer.failure_message.removeprefix(start)


@asynccontextmanager
async def open_calls(**extra: UtilityHandler) -> AsyncIterator[CallRig]:
    async with open_loop() as rig, trio.open_nursery() as nursery:
        rig.loop.start_utility_call = UtilityCalls(rig.loop, nursery, extra).start
        yield CallRig(rig, nursery)
        nursery.cancel_scope.cancel()
