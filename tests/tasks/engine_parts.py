"""An engine in the test's own nursery, and the front end that a test plays by hand."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from trio_engine.config import EngineConfig
from trio_engine.core.plan import NewRow, StepPlan
from trio_engine.engine.engine_core_proc import NO_UTILITIES, run_engine_core
from trio_engine.executor.null import null_token
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.scripted_executor import ScriptedExecutor
from trio_engine.testing.wire_front_end import WireFrontEnd
from trio_engine.transport.context import ZmqContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from trio_engine.engine.engine_core_proc import EngineCoreProc
    from trio_engine.engine.utility import UtilityHandler
    from trio_engine.executor.base import Executor, ExecutorFactory
    from trio_engine.transport.socket import ZmqSocket

PROMPT = [1, 2, 3]

TEST_TIMEOUT_S = 20.0
"""No test here waits for time to pass; this ends one that would hang."""

CONFIG = EngineConfig(
    executor="null",
    max_model_len=64,
    block_size=4,
    num_blocks=64,
    max_num_seqs=4,
    handshake_timeout_s=10.0,
    flush_timeout_s=1.0,
)


@asynccontextmanager
async def open_engine_beside(
    executor: Executor | ExecutorFactory,
    *,
    config: EngineConfig = CONFIG,
    num_clients: int = 1,
    receive_hwm: int | None = None,
    utilities: Mapping[str, UtilityHandler] = NO_UTILITIES,
    ends_by_itself: bool = False,
    within_s: float = TEST_TIMEOUT_S,
) -> AsyncIterator[tuple[WireFrontEnd, EngineCoreProc]]:
    """A started engine and its front end; the end of the block cancels or awaits the engine.

    An engine that fails cancels the block, and its error leaves in the nursery's group.
    """
    factory = executor if callable(executor) else lambda _config: executor
    with trio.fail_after(within_s):
        async with (
            WireFrontEnd(num_clients, receive_hwm=receive_hwm) as front_end,
            trio.open_nursery() as nursery,
        ):
            async with trio.open_nursery() as start:
                start.start_soon(front_end.start_up)
                proc = await nursery.start(
                    partial(
                        run_engine_core,
                        config,
                        executor_factory=factory,
                        handshake_address=front_end.handshake_address,
                        utilities=utilities,
                    )
                )
            try:
                yield front_end, proc
            finally:
                if isinstance(executor, ScriptedExecutor):
                    for gate in executor.gates.values():
                        gate.open()
            if not ends_by_itself:
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_scripted(
    *,
    config: EngineConfig = CONFIG,
    launches_ahead: bool = False,
    num_clients: int = 1,
    receive_hwm: int | None = None,
    utilities: Mapping[str, UtilityHandler] = NO_UTILITIES,
    ends_by_itself: bool = False,
) -> AsyncIterator[tuple[WireFrontEnd, EngineCoreProc, ScriptedExecutor]]:
    """``open_engine_beside`` with a scripted executor, whose gates open at the end."""
    executor = ScriptedExecutor(config, launches_ahead=launches_ahead)
    async with open_engine_beside(
        executor,
        config=config,
        num_clients=num_clients,
        receive_hwm=receive_hwm,
        utilities=utilities,
        ends_by_itself=ends_by_itself,
    ) as (front_end, proc):
        yield front_end, proc, executor


def make_plan(plan_id: int, *request_ids: str, new: bool = False, reset: bool = False) -> StepPlan:
    """One token for each request; a request's slot is its place. ``new`` sets up the rows."""
    rows = [
        NewRow(
            slot=slot,
            request_id=request_id,
            token_ids=[7],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_ids=[slot],
            sampling_params=SamplingParams(),
        )
        for slot, request_id in enumerate(request_ids)
    ]
    return StepPlan(
        plan_id=plan_id,
        slots=list(range(len(request_ids))),
        num_scheduled_tokens=[1] * len(request_ids),
        new_rows=rows if new or reset else [],
        reset=reset,
    )


def check_nothing_held(proc: EngineCoreProc) -> None:
    statistics = proc.statistics()
    assert statistics is not None
    assert (statistics.num_running_requests, statistics.num_waiting_requests) == (0, 0)
    assert statistics.num_free_blocks == statistics.num_blocks


def null_tokens(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return [null_token(prompt, position) for position in range(count)]


def reader_sockets(proc: EngineCoreProc) -> list[ZmqSocket]:
    """The engine's inputs. Closing one is how a task fails for a reason of its own."""
    context = proc._context
    assert isinstance(context, ZmqContext)
    return [socket for socket in context._sockets if socket.statistics().tasks_waiting_receive]
