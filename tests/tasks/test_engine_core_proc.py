"""A whole engine in the test's nursery serves a hand-made front end over real sockets."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from tests.tasks.engine_parts import (
    CONFIG,
    PROMPT,
    check_nothing_held,
    null_tokens,
    open_engine_beside,
    open_scripted,
)
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason

if TYPE_CHECKING:
    from trio_engine.config import EngineConfig
    from trio_engine.core.engine_core import EngineCore
    from trio_engine.testing.scripted_executor import Gate
    from trio_engine.testing.wire_front_end import WireFrontEnd


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
async def test_requests_of_all_clients_run_to_their_ends(depth: Any, launches_ahead: bool) -> None:
    config = msgspec.structs.replace(CONFIG, pipeline_depth=depth)

    def make(config: EngineConfig) -> KVCheckingExecutor:
        return KVCheckingExecutor(config, launches_ahead=launches_ahead)

    async with open_engine_beside(make, config=config, num_clients=3) as (front_end, proc):
        for index in range(30):
            await front_end.add(f"r{index}", [index + 1] * 5, client=index % 3, max_tokens=7)
        for index in range(30):
            log = await front_end.finish(f"r{index}", client=index % 3)
            assert (len(log.token_ids), log.finish_reason) == (7, FinishReason.LENGTH)
        check_nothing_held(proc)


async def test_what_it_announces() -> None:
    async with open_scripted() as (front_end, proc, _):
        ready = front_end.ready_response
        assert ready is not None
        assert (ready.max_model_len, ready.num_gpu_blocks, ready.block_size) == (64, 64, 4)
        assert (ready.kv_cache_size_tokens, ready.kv_cache_max_concurrency) == (256, 4.0)
        assert ready.dp_stats_address is None
        statistics = proc.statistics()
        assert statistics is not None
        assert statistics.num_steps == 0


async def test_an_engine_in_somebody_elses_process_leaves_its_garbage_collector_alone() -> None:
    async with open_scripted():
        assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        async with open_scripted():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.known_fault(kind="abort-during-a-step")
async def test_an_abort_while_the_step_runs_frees_at_once_and_yields_nothing() -> None:
    async with open_scripted() as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("x", PROMPT, max_tokens=8)
        await front_end.add("y", PROMPT, max_tokens=2)
        await gate.wait_held()
        await front_end.abort("x")
        assert (await front_end.call_utility("is_sleeping")).failure_message is None
        gate.open()
        assert (await front_end.finish("y")).token_ids == null_tokens(2)
        assert front_end.logs[(0, "x")].outputs == []
        check_nothing_held(proc)


@pytest.mark.known_fault(kind="late-abort")
@pytest.mark.parametrize("call", ["launch", "collect"])
async def test_an_id_used_again_while_the_step_of_its_aborted_request_runs_is_a_new_request(
    call: Any,
) -> None:
    """The first was planned by then, or computed."""
    async with open_scripted() as (front_end, proc, executor):
        gate = executor.gates[call]
        for _ in range(20):
            gate.close()
            await front_end.add("x", [1], max_tokens=50)
            first = front_end.logs[(0, "x")]
            await gate.wait_held()
            await front_end.abort("x")
            await front_end.add("x", [2], max_tokens=5)
            await front_end.call_utility("is_sleeping")  # so all of it was taken
            gate.open()
            second = await front_end.finish("x")
            assert (second.token_ids, second.finish_reason) == (
                null_tokens(5, [2]),
                FinishReason.LENGTH,
            )
            assert first.outputs == []
        check_nothing_held(proc)


@pytest.mark.known_fault(kind="shared-id")
async def test_one_id_of_two_clients_is_two_requests() -> None:
    """In one step, each to its own end; an abort is for the client's own and no other."""
    async with open_scripted(num_clients=2) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("x", [1], client=0, max_tokens=3)
        await front_end.add("x", [5], client=1, max_tokens=8)
        await gate.wait_held()
        gate.open()
        assert (await front_end.finish("x", client=0)).token_ids == null_tokens(3, [1])
        assert (await front_end.finish("x", client=1)).token_ids == null_tokens(8, [5])
        gate.close()
        await front_end.add("x", [2], client=0, max_tokens=3)  # the ids are free again
        await front_end.add("x", [6], client=1, max_tokens=3)
        await gate.wait_held()
        # A third under a live id of the same client: dropped, the first must not notice.
        first = front_end.logs[(0, "x")]
        await front_end.add("x", [9], client=0, max_tokens=3)
        front_end.logs[(0, "x")] = first
        await front_end.abort("x", client=1)
        await front_end.abort("x", client=1)  # who has none any more
        for client in range(2):  # so all of it was taken
            await front_end.call_utility("is_sleeping", client=client)
        gate.open()
        assert (await front_end.finish("x", client=0)).token_ids == null_tokens(3, [2])
        assert front_end.logs[(1, "x")].outputs == []
        check_nothing_held(proc)


async def test_answers_come_after_the_outputs_before_them() -> None:
    async with open_scripted() as (front_end, _, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("x", PROMPT, max_tokens=8)
        await gate.wait_held()
        call_id = await front_end.post_utility("pause_scheduler", "keep", False)
        gate.open()
        await front_end.wait_answer(call_id)
        log = front_end.logs[(0, "x")]
        assert log.token_ids == null_tokens(len(log.token_ids))
        assert log.token_ids
        num_tokens = len(log.token_ids)
        await front_end.call_utility("is_sleeping")
        assert len(log.token_ids) == num_tokens  # nothing more while it is paused
        await front_end.call_utility("resume_scheduler")
        assert (await front_end.finish("x")).token_ids == null_tokens(8)


async def test_a_step_that_fails_for_some_rows_ends_these_only() -> None:
    async with open_scripted() as (front_end, proc, executor):
        executor.fail_requests("collect", "bad")
        await front_end.add("good", PROMPT, max_tokens=5)
        await front_end.add("bad", PROMPT, max_tokens=5)
        assert (await front_end.finish("good")).token_ids == null_tokens(5)
        assert (await front_end.finish("bad")).finish_reason is FinishReason.ERROR
        check_nothing_held(proc)


async def test_a_utility_of_the_library_user() -> None:
    async def later(value: int) -> int:
        await trio.lowlevel.checkpoint()
        return value + 1

    async with open_scripted(utilities={"later": later}) as (front_end, _, _):
        assert (await front_end.call_utility("later", 4)).result == (None, 5)
        failure = (await front_end.call_utility("later", "four")).failure_message
        assert failure is not None
        assert failure.startswith("Call to later method failed: ")


async def fill_way_to_client_0(front_end: WireFrontEnd, core: EngineCore, gate: Gate) -> None:
    """Asks for answers that client 0 does not read, until its writer stands and its outbox is full.

    It has to stay full for a while. Each turn waits for a call of client 1, which goes by the same
    threads of ZeroMQ, and lets one step end, as only a step looks who does not read.
    """
    num_turns_full = 0
    while core.has_requests or num_turns_full < 5:
        num_turns_full += 1
        if not core.outboxes[0].is_full:
            num_turns_full = 0
            await front_end.post_utility("big", client=0)
        gate.let_pass()
        await front_end.call_utility("is_sleeping", client=1)


async def test_a_client_that_does_not_read_ends_by_itself() -> None:
    """Its requests get ERROR, its ADDs wait until it reads, the other client notices nothing."""
    # Far more than all tokens of the other one take, however late they are read.
    config = msgspec.structs.replace(CONFIG, outbox_limit_bytes=1 << 20, max_model_len=2048)
    config = msgspec.structs.replace(config, num_blocks=2048)
    async with open_scripted(
        config=config, num_clients=2, receive_hwm=1, utilities={"big": lambda: "x" * 200_000}
    ) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("slow", PROMPT, client=0, max_tokens=2000)
        await gate.wait_held()
        assert proc.core is not None
        await fill_way_to_client_0(front_end, proc.core, gate)
        gate.open()
        await front_end.add("other", PROMPT, client=1, max_tokens=2000)
        other = await front_end.finish("other", client=1)
        assert other.token_ids == null_tokens(2000)
        await front_end.add("late", PROMPT, client=0, max_tokens=1)
        await front_end.call_utility("is_sleeping", client=1)
        check_nothing_held(proc)
        assert (await front_end.finish("slow", client=0)).finish_reason is FinishReason.ERROR
        assert (await front_end.finish("late", client=0)).finish_reason is FinishReason.LENGTH
