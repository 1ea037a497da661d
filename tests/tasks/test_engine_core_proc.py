"""A whole engine in the test's nursery, over real sockets, beside a hand-made front end."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import CONFIG, TEST_TIMEOUT_S, open_engine_beside, open_scripted
from trio_engine.engine.engine_core_proc import (
    NO_UTILITIES,
    EngineCoreProc,
    EngineIdentity,
    run_engine_core,
)
from trio_engine.engine.step_loop import SHUTTING_DOWN
from trio_engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    ModelError,
    ProtocolError,
    RequestStepError,
    StepError,
)
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.executor.null import null_token
from trio_engine.outputs import FinishReason
from trio_engine.testing.scripted_executor import ScriptedExecutor
from trio_engine.testing.wire_front_end import WireFrontEnd
from trio_engine.transport.context import open_context
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import encode_control
from trio_engine.wire.handshake import ExpectedEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from trio_engine.config import EngineConfig
    from trio_engine.engine.utility import UtilityHandler
    from trio_engine.executor.base import ExecutorFactory
    from trio_engine.transport.socket import ZmqSocket

PROMPT = [1, 2, 3]


def check_nothing_held(proc: EngineCoreProc) -> None:
    statistics = proc.statistics()
    assert statistics is not None
    assert (statistics.num_running_requests, statistics.num_waiting_requests) == (0, 0)
    assert statistics.num_free_blocks == statistics.num_blocks


def null_tokens(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return [null_token(prompt, position) for position in range(count)]


# Serving


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


async def test_two_clients_may_use_one_id() -> None:
    async with open_scripted(num_clients=2) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("x", [1], client=0, max_tokens=3)
        await front_end.add("x", [5], client=1, max_tokens=3)
        await gate.wait_held()
        # A third under a live id of the same client: dropped, the first must not notice.
        log = front_end.logs[(0, "x")]
        await front_end.add("x", [9], client=0, max_tokens=3)
        front_end.logs[(0, "x")] = log
        await front_end.abort("x", client=1)
        await front_end.call_utility("is_sleeping", client=1)
        gate.open()
        assert (await front_end.finish("x", client=0)).token_ids == null_tokens(3, [1])
        assert front_end.logs[(1, "x")].outputs == []
        await front_end.add("x", [2], client=0, max_tokens=1)  # the id is free again
        assert (await front_end.finish("x", client=0)).token_ids == null_tokens(1, [2])
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


async def test_a_client_that_does_not_read_ends_by_itself() -> None:
    """Its requests get ERROR, its ADDs are refused, the other client notices nothing."""
    config = msgspec.structs.replace(CONFIG, outbox_limit_bytes=4096, max_model_len=2048)
    config = msgspec.structs.replace(config, num_blocks=2048)
    async with open_scripted(config=config, num_clients=2, receive_hwm=1) as (
        front_end,
        proc,
        executor,
    ):
        # Answers that fill every buffer on the way to client 0, whose writer then stands.
        executor.commands["big"] = lambda: "x" * 200_000
        for _ in range(50):
            await front_end.post_utility("collective_rpc", "big", client=0)
        await front_end.add("slow", PROMPT, client=0, max_tokens=2000)
        await front_end.add("other", PROMPT, client=1, max_tokens=2000)
        other = await front_end.finish("other", client=1)
        assert other.token_ids == null_tokens(2000)
        await front_end.add("late", PROMPT, client=0)
        await front_end.call_utility("is_sleeping", client=1)
        check_nothing_held(proc)
        assert (await front_end.finish("slow", client=0)).finish_reason is FinishReason.ERROR
        assert (await front_end.finish("late", client=0)).finish_reason is FinishReason.ERROR
        await front_end.add("again", PROMPT, client=0, max_tokens=1)
        assert (await front_end.finish("again", client=0)).finish_reason is FinishReason.LENGTH


# Stopping


async def stop(proc: EngineCoreProc) -> None:
    proc.shutdown.request("the test")


async def test_a_stop_without_a_drain_aborts_everything_and_returns() -> None:
    async with open_scripted(ends_by_itself=True, num_clients=2) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        for index in range(6):  # four run, two wait
            await front_end.add(f"r{index}", PROMPT, client=index % 2)
        await gate.wait_held()
        await stop(proc)
        for index in range(6):  # told while the step still runs
            log = await front_end.finish(f"r{index}", client=index % 2)
            assert (log.token_ids, log.finish_reason) == ([], FinishReason.ABORT)
        check_nothing_held(proc)


async def test_what_comes_while_the_last_step_is_waited_for_is_refused() -> None:
    async with open_scripted(ends_by_itself=True) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("x", PROMPT)
        await gate.wait_held()
        await stop(proc)
        await front_end.finish("x")
        await front_end.add("late", PROMPT)
        assert (await front_end.finish("late")).finish_reason is FinishReason.ABORT
        assert (await front_end.call_utility("is_sleeping")).failure_message == SHUTTING_DOWN


async def test_everything_that_it_took_before_it_left_is_answered() -> None:
    """More than the inbox holds: the rest is in ZeroMQ when the readers end, or on its way."""
    async with open_scripted(ends_by_itself=True) as (front_end, proc, _):
        (socket,) = reader_sockets(proc)
        for index in range(500):
            await front_end.add(f"r{index}", PROMPT, max_tokens=60)
        await front_end.wait_num_tokens("r0", 1)
        await stop(proc)
        while not socket.statistics().closed:
            await trio.lowlevel.checkpoint()
        num_taken = socket.statistics().messages_received
        assert num_taken > 0
        for index in range(num_taken):
            assert (await front_end.finish(f"r{index}")).finish_reason is not None
        check_nothing_held(proc)


async def test_a_drain_ends_with_the_last_request_and_refuses_new_ones() -> None:
    config = msgspec.structs.replace(CONFIG, shutdown_timeout_s=60.0, max_num_seqs=1)
    async with open_scripted(ends_by_itself=True, config=config) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("running", PROMPT, max_tokens=3)
        await front_end.add("waiting", PROMPT, max_tokens=3)
        await front_end.add("aborted", PROMPT, max_tokens=3)
        await gate.wait_held()
        await stop(proc)
        await wait_all_tasks_blocked()
        await front_end.add("late", PROMPT)
        assert (await front_end.finish("late")).finish_reason is FinishReason.ABORT
        assert (await front_end.call_utility("is_sleeping")).failure_message == SHUTTING_DOWN
        await front_end.abort("aborted")
        gate.open()
        for request_id in ("running", "waiting"):
            log = await front_end.finish(request_id)
            assert (log.token_ids, log.finish_reason) == (null_tokens(3), FinishReason.LENGTH)
        assert front_end.logs[(0, "aborted")].outputs == []


@pytest.mark.parametrize("ending", ["deadline", "second request", "owner is gone"])
async def test_a_drain_that_is_cut_short_aborts_the_rest(ending: str) -> None:
    timeout_s = 0.1 if ending == "deadline" else 60.0
    config = msgspec.structs.replace(CONFIG, shutdown_timeout_s=timeout_s)
    async with open_scripted(ends_by_itself=True, config=config) as (front_end, proc, executor):
        gate = executor.gates["collect"]
        gate.close()
        await front_end.add("x", PROMPT)
        await gate.wait_held()
        gate.let_pass(2)
        await gate.wait_held()
        await stop(proc)
        await wait_all_tasks_blocked()
        if ending == "second request":
            await stop(proc)
        elif ending == "owner is gone":
            proc.shutdown.lose_owner()
        log = await front_end.finish("x")
        assert (log.token_ids, log.finish_reason) == (null_tokens(2), FinishReason.ABORT)


async def test_a_drain_while_paused_ends() -> None:
    config = msgspec.structs.replace(CONFIG, shutdown_timeout_s=60.0)
    async with open_scripted(ends_by_itself=True, config=config) as (front_end, proc, _):
        await front_end.call_utility("pause_scheduler", "keep")
        await front_end.add("x", PROMPT, max_tokens=2)
        await front_end.call_utility("is_scheduler_paused")
        await stop(proc)
        assert (await front_end.finish("x")).finish_reason is FinishReason.LENGTH


async def test_a_pending_utility_call_is_answered_at_the_end() -> None:
    async with open_scripted(ends_by_itself=True) as (front_end, proc, executor):
        executor.gates["command"].close()
        call_id = await front_end.post_utility("collective_rpc", "echo")
        await executor.gates["command"].wait_held()
        await stop(proc)
        await wait_all_tasks_blocked()
        executor.gates["command"].open()
        assert (await front_end.wait_answer(call_id)).failure_message == SHUTTING_DOWN


async def test_cancelling_it_is_a_stop_without_a_drain() -> None:
    """The caller's scope: the running step is waited for, every client is told, nothing raised."""
    config = msgspec.structs.replace(CONFIG, shutdown_timeout_s=60.0)
    executor = ScriptedExecutor(config)
    gate = executor.gates["collect"]
    with trio.fail_after(TEST_TIMEOUT_S), executor.gates_open_at_end():
        async with WireFrontEnd(2) as front_end:
            proc = EngineCoreProc(
                config, lambda _: executor, handshake_address=front_end.handshake_address
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(proc.run)
                await front_end.start_up()
                gate.close()
                for client in range(2):
                    await front_end.add("x", PROMPT, client=client)
                    await front_end.call_utility("is_sleeping", client=client)
                await gate.wait_held()
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    assert nursery.child_tasks, "it must wait for the thread"
                    gate.open()
            for client in range(2):
                log = await front_end.finish("x", client=client)
                assert log.finish_reason is FinishReason.ABORT
            check_nothing_held(proc)
            assert executor.calls[-1] == "shutdown"
            num_calls = len(executor.calls)
            await wait_all_tasks_blocked(0.05)
            assert len(executor.calls) == num_calls


async def test_a_stop_before_it_is_ready_ends_it_quietly() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd() as front_end:
            proc = EngineCoreProc(
                CONFIG, ScriptedExecutor, handshake_address=front_end.handshake_address
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(proc.run)
                await front_end.receive_handshake()
                assert proc.statistics() is None
                await stop(proc)


# Bad frames beside a healthy stream


def add_body(request_id: object, prompt: object = (1, 2)) -> list[object]:
    params = {"temperature": 0.0, "max_tokens": 4}
    return [request_id, prompt, None, params, None, 0.0, None, None, None]


pack = msgspec.msgpack.encode

MAX_MODEL_LEN = 2048

TENSOR = ["float32", [4, 4], 1]
"""A tensor that refers to the first aux frame."""


class BadFrames(NamedTuple):
    """What is sent, and what it deserves beside a log line.

    ``is_refused``: an ERROR output for "bad". ``call_id``: a failure of this call.
    """

    frames: list[bytes]
    is_refused: bool = False
    call_id: int | None = None


def bad_add(*body: object, aux: tuple[bytes, ...] = ()) -> BadFrames:
    return BadFrames([b"\x00", pack(body), *aux], is_refused=True)


def bad_call(call_id: int, *body: object) -> BadFrames:
    return BadFrames([b"\x03", pack(body)], call_id=call_id)


BAD_FRAMES: dict[str, BadFrames] = {
    "no frame": BadFrames([]),
    "one empty frame": BadFrames([b""]),
    "an unknown type": BadFrames([b"\x04", pack([])]),
    "a type of two bytes": BadFrames([b"\x00\x00", pack(add_body("bad"))]),
    "READY from no coordinator": BadFrames([b"READY"]),
    "ADD without a body": BadFrames([b"\x00"]),
    "ADD with an empty body": BadFrames([b"\x00", b""]),
    "ADD cut off": BadFrames([b"\x00", pack(add_body("bad"))[:-9]], is_refused=True),
    "ADD and more": BadFrames([b"\x00", pack(add_body("bad")) + b"\x00"], is_refused=True),
    "ADD whose id is a float": BadFrames([b"\x00", pack(add_body(1.5))]),
    "ADD whose id is nil": BadFrames([b"\x00", pack(add_body(None))]),
    "ADD whose id is bytes": BadFrames([b"\x00", pack(add_body(b"bad"))]),
    "ADD that is a map": BadFrames([b"\x00", pack({"request_id": "bad"})]),
    "ADD too hot": bad_add(*add_body("bad")[:3], {"temperature": 9}, *add_body("bad")[4:]),
    "ADD with a tensor whose frame is absent": bad_add(*add_body("bad"), TENSOR),
    "ADD with a tensor whose frame is short": bad_add(*add_body("bad"), TENSOR, aux=(b"x",)),
    "ADD that never fits": bad_add(*add_body("bad", [1] * MAX_MODEL_LEN)),
    "ADD with an id beyond the vocabulary": bad_add(*add_body("bad", [50_000])),
    "ADD with a negative id": bad_add(*add_body("bad", [-1])),
    "ADD without a prompt": bad_add(*add_body("bad", None)),
    "ADD with an empty prompt": bad_add(*add_body("bad", [])),
    "ADD for no client": BadFrames([b"\x00", pack([*add_body("bad"), None, None, 9])]),
    "ADD under the live id": BadFrames([b"\x00", pack(add_body("healthy"))]),
    "ADD cut off under the live id": BadFrames([b"\x00", pack(add_body("healthy"))[:-9]]),
    "ADD that is a pickle": BadFrames([b"\x00", pack(msgspec.msgpack.Ext(1, b"cposix\nx\n."))]),
    "ABORT of nil": BadFrames([b"\x01", pack(None)]),
    "ABORT of a list in a list": BadFrames([b"\x01", pack([["healthy"]])]),
    "ABORT of a number": BadFrames([b"\x01", pack(1)]),
    "ABORT of somebody unknown": BadFrames([b"\x01", pack("unknown")]),
    "ABORT without a body": BadFrames([b"\x01"]),
    "START_DP_WAVE": BadFrames([b"\x02", pack([1, None])]),
    "START_DP_WAVE of rubbish": BadFrames([b"\x02", pack("x")]),
    "UTILITY with three fields": bad_call(901, 0, 901, "is_sleeping"),
    "UTILITY with five fields": bad_call(902, 0, 902, "is_sleeping", [], 1),
    "UTILITY of a private name": bad_call(903, 0, 903, "_turn", []),
    "UTILITY of what is no method": bad_call(904, 0, 904, "core", []),
    "UTILITY whose arguments are a map": bad_call(905, 0, 905, "is_sleeping", {}),
    "UTILITY for no client": BadFrames([b"\x03", pack([7, 906, "is_sleeping", []])]),
    "UTILITY with a negative id": BadFrames([b"\x03", pack([0, -1, "is_sleeping", []])]),
    "UTILITY that is not UTF-8": BadFrames(
        [b"\x03", b"\x94\x00" + pack(907) + b"\xa2\xff\xff\x90"], call_id=907
    ),
    "nesting without end": BadFrames([b"\x03", b"\x91" * 100_000]),
}


async def test_no_bad_frame_harms_the_stream_beside_it() -> None:
    """Each is dropped or answered, and the stream's tokens are those of its run alone."""
    config = msgspec.structs.replace(CONFIG, max_model_len=MAX_MODEL_LEN, num_blocks=1024)
    async with open_engine_beside(KVCheckingExecutor, config=config) as (front_end, proc):
        await front_end.add("healthy", PROMPT, max_tokens=MAX_MODEL_LEN)
        healthy = front_end.logs[(0, "healthy")]
        for name, bad in BAD_FRAMES.items():
            await front_end.wait_num_tokens("healthy", len(healthy.token_ids) + 1)
            await front_end.call_utility("pause_scheduler", "keep", False)  # or it would be over
            refused = front_end.listen("bad")
            await front_end.send_frames(bad.frames)
            if bad.call_id is not None:
                assert (await front_end.wait_answer(bad.call_id)).failure_message, name
            await front_end.call_utility("resume_scheduler")
            reason = FinishReason.ERROR if bad.is_refused else None
            assert refused.finish_reason is reason, name
            assert healthy.finish_reason is None, name
        await front_end.abort("healthy")
        await front_end.call_utility("is_sleeping")
        check_nothing_held(proc)
    async with open_engine_beside(KVCheckingExecutor, config=config) as (front_end, _):
        await front_end.add("alone", PROMPT, max_tokens=len(healthy.token_ids))
        assert (await front_end.finish("alone")).token_ids == healthy.token_ids


# Failing after READY


async def run_until_dead(
    executor: ScriptedExecutor,
    fail: Callable[[WireFrontEnd, EngineCoreProc], Awaitable[object]],
    *,
    utilities: Mapping[str, UtilityHandler] = NO_UTILITIES,
    told: Sequence[int] = (0, 1),
) -> EngineDeadError:
    """Runs an engine with two clients; returns its error when those ``told`` heard of it."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(2, receive_hwm=1) as front_end, trio.open_nursery() as nursery:
            proc = EngineCoreProc(
                CONFIG,
                lambda _: executor,
                handshake_address=front_end.handshake_address,
                utilities=utilities,
            )
            errors: list[EngineDeadError] = []

            async def run() -> None:
                with pytest.raises(EngineDeadError) as caught:
                    await proc.run()
                errors.append(caught.value)

            nursery.start_soon(run)
            await front_end.start_up()
            await front_end.call_utility("is_sleeping")  # READY was said before it serves
            await fail(front_end, proc)
            for client in told:
                await front_end.wait_dead(client)
                await front_end.check_silent(client)
    (error,) = errors
    return error


def reader_sockets(proc: EngineCoreProc) -> list[ZmqSocket]:
    """The engine's inputs. Closing one is how a task fails for a reason of its own."""
    return [
        socket for socket in proc._context._sockets if socket.statistics().tasks_waiting_receive
    ]


@pytest.mark.parametrize("call", ["launch", "collect"])
async def test_a_crash_in_a_step_is_told_to_every_client(call: Any) -> None:
    executor = ScriptedExecutor(CONFIG)
    lost = RuntimeError("device lost")
    executor.fail_next(call, lost)
    error = await run_until_dead(executor, lambda front_end, _: front_end.add("x", PROMPT))
    assert "'x'" in str(error)
    assert isinstance(error.__cause__, StepError)
    assert error.__cause__.__cause__ is lost
    assert executor.calls[-1] == "shutdown"


async def test_a_failure_that_the_core_does_not_believe_is_a_crash() -> None:
    executor = ScriptedExecutor(CONFIG)
    executor.fail_next("collect", RequestStepError("no such row", slots=[99]))
    error = await run_until_dead(executor, lambda front_end, _: front_end.add("x", PROMPT))
    assert isinstance(error.__cause__, StepError)


@pytest.mark.parametrize("num_failing", [1, 2])
async def test_readers_that_fail_are_one_error(
    num_failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: WireFrontEnd, proc: EngineCoreProc) -> None:
        await wait_all_tasks_blocked()
        for socket in reader_sockets(proc)[:num_failing]:
            socket.close()

    error = await run_until_dead(ScriptedExecutor(CONFIG), fail)
    assert isinstance(error.__cause__, trio.ClosedResourceError)
    assert caplog.text.count("engine_failed ready=True") == num_failing


async def test_a_failure_does_not_hide_behind_a_cancellation() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(2) as front_end:
            proc = EngineCoreProc(
                CONFIG, ScriptedExecutor, handshake_address=front_end.handshake_address
            )
            with pytest.RaisesGroup(EngineDeadError):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(proc.run)
                    await front_end.start_up()
                    await front_end.call_utility("is_sleeping")
                    await wait_all_tasks_blocked()
                    reader_sockets(proc)[0].close()
                    nursery.cancel_scope.cancel()


async def test_a_writer_that_fails_ends_the_engine_loudly() -> None:
    """A result that its owner changes after it was given: only the writer can find that."""
    shared: list[object] = []
    was_shared = trio.Event()

    def share() -> list[object]:
        was_shared.set()
        return shared

    async def fail(front_end: WireFrontEnd, _proc: EngineCoreProc) -> None:
        # Answers that fill every buffer on the way to client 0, whose writer then stands.
        for _ in range(50):
            await front_end.post_utility("big", client=0)
        await front_end.post_utility("share", client=0)
        await was_shared.wait()
        await front_end.call_utility("spoil", client=1)
        while True:
            with trio.move_on_after(0.5) as scope:
                await front_end.next_outputs(client=0)
            if scope.cancelled_caught:
                break

    error = await run_until_dead(
        ScriptedExecutor(CONFIG),
        fail,
        utilities={
            "big": lambda: "x" * 200_000,
            "share": share,
            "spoil": lambda: shared.append(object()),
        },
        told=[1],
    )
    assert isinstance(error.__cause__, ProtocolError)


# Start-up


async def test_it_starts_as_the_engine_that_it_is_told_to_be() -> None:
    expected = ExpectedEngine(3, local=False, headless=True)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(engine=expected) as front_end, trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(
                    run_engine_core,
                    CONFIG,
                    executor_factory=ScriptedExecutor,
                    handshake_address=front_end.handshake_address,
                    identity=EngineIdentity(engine_index=3, local=False, headless=True),
                )
            )
            await front_end.start_up()
            await front_end.add("x", PROMPT, max_tokens=1)
            assert (await front_end.next_outputs()).engine_index == 3
            nursery.cancel_scope.cancel()


async def start(
    front_end: WireFrontEnd,
    *,
    make: ExecutorFactory = ScriptedExecutor,
    config: EngineConfig = CONFIG,
    address: str | None = None,
) -> EngineStartError:
    """Starts an engine that must fail to; its error comes out of ``nursery.start`` as it is."""
    async with trio.open_nursery() as nursery:
        with pytest.raises(EngineStartError) as caught:
            await nursery.start(
                partial(
                    run_engine_core,
                    config,
                    executor_factory=make,
                    handshake_address=address or front_end.handshake_address,
                )
            )
    return caught.value


async def test_no_init_in_time() -> None:
    config = msgspec.structs.replace(CONFIG, handshake_timeout_s=0.05)
    async with WireFrontEnd() as front_end:
        error = await start(front_end, config=config)
        assert "no INIT" in str(error)
        assert front_end.handshake_address in str(error)
        assert "0.05 s" in str(error)


async def test_a_hello_that_nobody_took_does_not_hold_up_the_end(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, handshake_timeout_s=0.05)
    async with WireFrontEnd() as front_end:
        started = trio.current_time()
        await start(front_end, config=config, address=f"ipc://{tmp_path}/nobody")
        assert trio.current_time() - started < 2  # what ends it is shielded


@pytest.mark.parametrize("address", ["ipc://" + "x" * 200, "carrier-pigeon", "tcp://nohost"])
async def test_an_address_that_cannot_be(address: str) -> None:
    async with WireFrontEnd() as front_end:
        error = await start(front_end, address=address)
        assert isinstance(error.__cause__, ConfigError)


@pytest.mark.parametrize(
    "frames",
    [
        [b"rubbish"],
        [b"\x80", b"\x80"],
        [
            encode_control(
                {"addresses": {"inputs": ["ipc:///a"], "outputs": []}, "parallel_config": {}}
            )
        ],
    ],
)
async def test_what_is_no_init(frames: list[bytes]) -> None:
    async with WireFrontEnd() as front_end, trio.open_nursery() as nursery:

        async def answer() -> None:
            await front_end.receive_handshake()
            await front_end.send_handshake(frames)

        nursery.start_soon(answer)
        error = await start(front_end)
        assert isinstance(error.__cause__, ProtocolError)


@pytest.mark.parametrize("direction", ["inputs", "outputs"])
async def test_an_init_with_an_address_that_cannot_be(direction: str) -> None:
    """The executor is loaded by then, and must be shut down."""
    executor = ScriptedExecutor(CONFIG)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd(2) as front_end, trio.open_nursery() as nursery:
            getattr(front_end.addresses, direction)[1] = "ipc://" + "x" * 200
            nursery.start_soon(front_end.greet)
            error = await start(front_end, make=lambda _: executor)
            assert isinstance(error.__cause__, ConfigError)
            assert executor.calls == ["load", "shutdown"]


@pytest.mark.parametrize("fault", [ModelError("no such model"), RuntimeError("out of memory")])
async def test_a_load_that_fails(fault: Exception) -> None:
    executor = ScriptedExecutor(CONFIG)
    executor.fail_next("load", fault)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd() as front_end, trio.open_nursery() as nursery:
            nursery.start_soon(front_end.greet)
            error = await start(front_end, make=lambda _: executor)
            assert str(fault) in str(error)
            causes = [error.__cause__, error.__cause__ and error.__cause__.__cause__]
            assert fault in causes
            assert executor.calls == ["load", "shutdown"]


async def test_an_executor_that_cannot_be_made() -> None:
    def make(_: EngineConfig) -> ScriptedExecutor:
        raise ImportError("no module named torch")

    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd() as front_end, trio.open_nursery() as nursery:
            nursery.start_soon(front_end.greet)
            error = await start(front_end, make=make)
            assert "no module named torch" in str(error)


@pytest.mark.parametrize("stage", ["handshake", "load", "coordinator"])
async def test_cancelling_the_start_leaves_nothing(stage: str) -> None:
    """The leak guard looks at threads and sockets; a load is waited for."""
    executor = ScriptedExecutor(CONFIG)
    gate = executor.gates["load"]
    gate.close()
    with trio.fail_after(TEST_TIMEOUT_S), executor.gates_open_at_end():
        async with WireFrontEnd() as front_end, trio.open_nursery() as nursery:
            front_end.addresses.coordinator_input = front_end.handshake_address + "-nobody"
            nursery.start_soon(
                partial(
                    run_engine_core,
                    CONFIG,
                    executor_factory=lambda _: executor,
                    handshake_address=front_end.handshake_address,
                )
            )
            if stage == "handshake":
                await front_end.receive_handshake()
            else:
                await front_end.greet()
                await gate.wait_held()
            if stage == "coordinator":
                gate.open()
                await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            if stage == "load":
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    assert nursery.child_tasks
                gate.open()
    assert executor.calls in ([], ["load", "shutdown"])


async def test_it_waits_for_the_coordinator(tmp_path: Path) -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with WireFrontEnd() as front_end, open_context() as context:
            coordinator = context.socket(SocketKind.XPUB)
            address = coordinator.bind(f"ipc://{tmp_path}/c")
            front_end.addresses.coordinator_input = address
            async with trio.open_nursery() as nursery:
                proc = EngineCoreProc(
                    CONFIG, ScriptedExecutor, handshake_address=front_end.handshake_address
                )
                nursery.start_soon(proc.run)
                machine = await front_end.greet()
                assert await coordinator.receive() == [b"\x01"]
                await coordinator.send([b"something else"])
                await wait_all_tasks_blocked()
                await coordinator.send([b"READY"])
                await front_end.wait_ready(machine)
                await front_end.add("x", PROMPT, max_tokens=1)
                await front_end.finish("x")
                nursery.cancel_scope.cancel()
