"""The ways in which an engine does or does not become ready."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import (
    CONFIG,
    PROMPT,
    TEST_TIMEOUT_S,
)
from trio_engine.engine.engine_core_proc import (
    EngineCoreProc,
    EngineIdentity,
    run_engine_core,
)
from trio_engine.errors import (
    ConfigError,
    EngineStartError,
    ModelError,
    ProtocolError,
)
from trio_engine.testing.scripted_executor import ScriptedExecutor
from trio_engine.testing.wire_front_end import WireFrontEnd
from trio_engine.transport.context import open_context
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import encode_control
from trio_engine.wire.handshake import ExpectedEngine

if TYPE_CHECKING:
    from pathlib import Path

    from trio_engine.config import EngineConfig
    from trio_engine.executor.base import ExecutorFactory


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


@pytest.mark.known_fault(kind="bad-address")
async def test_no_init_in_time() -> None:
    config = msgspec.structs.replace(CONFIG, handshake_timeout_s=0.05)
    async with WireFrontEnd() as front_end:
        error = await start(front_end, config=config)
        assert "no INIT" in str(error)
        assert front_end.handshake_address in str(error)
        assert "0.05 s" in str(error)
        assert "HELLO of engine 0, local=True headless=False" in str(error)


@pytest.mark.known_fault(kind="bad-address")
async def test_a_hello_that_nobody_took_does_not_hold_up_the_end(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, handshake_timeout_s=0.05)
    async with WireFrontEnd() as front_end:
        started = trio.current_time()
        await start(front_end, config=config, address=f"ipc://{tmp_path}/nobody")
        assert trio.current_time() - started < 2  # what ends it is shielded


@pytest.mark.known_fault(kind="wrapped-error")
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


@pytest.mark.known_fault(kind="wrapped-error")
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
