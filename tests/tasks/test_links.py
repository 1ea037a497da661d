"""Sockets and tasks towards every client, and how they end."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import CONFIG, TEST_TIMEOUT_S
from tests.tasks.loop_parts import LoopRig
from tests.tasks.slow_network import SlowNetwork
from trio_engine.core.engine_core import LEAST_AMPLE_BACKLOG
from trio_engine.engine.links import ClientLinks
from trio_engine.engine.pumps import MAX_MESSAGES_PER_SLICE
from trio_engine.errors import ConfigError, ProtocolError
from trio_engine.outputs import FinishReason, UtilityOutput, UtilityResult
from trio_engine.requests import PauseMode
from trio_engine.testing.requests import make_request
from trio_engine.transport.context import open_context
from trio_engine.transport.ipc import IpcDirectory
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import RequestEncoder
from trio_engine.wire.messages import ENGINE_CORE_DEAD, AbortRequest, EngineZmqAddresses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from trio_engine.core.outbox import Outbox
    from trio_engine.transport.socket import ZmqSocket

NUM_CLIENTS = 2
FLUSH_TIMEOUT_S = 0.3


class LinksRig:
    """Links of an engine, and the sockets at their other ends."""

    def __init__(self, links: ClientLinks, addresses: EngineZmqAddresses) -> None:
        self.links = links
        self.addresses = addresses
        self.rig = LoopRig(CONFIG, num_clients=NUM_CLIENTS, launches_ahead=False)
        self.inputs: list[ZmqSocket] = []
        self.outputs: list[ZmqSocket] = []

    @property
    def outboxes(self) -> list[Outbox]:
        return self.rig.core.outboxes

    async def open(self, nursery: trio.Nursery) -> None:
        await self.links.open(
            self.addresses, self.rig.loop, b"announced", readers=nursery, writers=nursery
        )


@asynccontextmanager
async def open_links(*, linger_s: float = FLUSH_TIMEOUT_S) -> AsyncIterator[LinksRig]:
    with trio.fail_after(TEST_TIMEOUT_S), IpcDirectory() as directory:
        async with open_context() as theirs, open_context() as ours:
            links = ClientLinks(ours, b"\0\0", clock=time.monotonic, linger_s=linger_s)
            rig = LinksRig(links, EngineZmqAddresses(inputs=[], outputs=[]))
            for index in range(NUM_CLIENTS):
                inbound = theirs.socket(SocketKind.ROUTER)
                rig.addresses.inputs.append(inbound.bind(directory.address(f"in{index}")))
                rig.inputs.append(inbound)
                outbound = theirs.socket(SocketKind.PULL, receive_hwm=1, buffer_bytes=4096)
                rig.addresses.outputs.append(outbound.bind(directory.address(f"out{index}")))
                rig.outputs.append(outbound)
            yield rig


async def fill_way_to_client_0(rig: LinksRig) -> None:
    """It is connected, and its writer waits with more than all buffers on the way hold."""
    rig.outboxes[0].refuse("heard", FinishReason.ABORT)
    rig.links.flush(0)
    await rig.outputs[0].receive()
    for number in range(100):
        answer = UtilityOutput(number, result=UtilityResult(None, "x" * 50_000))
        rig.outboxes[0].put_utility_output(answer)
    rig.links.flush(0)
    await wait_all_tasks_blocked()


async def test_each_input_hears_the_announcement_and_is_read() -> None:
    async with open_links() as rig, trio.open_nursery() as nursery:
        await rig.open(nursery)
        for index, socket in enumerate(rig.inputs):
            assert await socket.receive() == [b"\0\0", b"announced"]
            await socket.send([b"\0\0", b"\x01", b"\x91\xa1x"])
            with trio.move_on_after(5):
                while not (arrivals := rig.rig.loop.inbox.take()):
                    await trio.lowlevel.checkpoint()
            assert arrivals[0].client_index == index
            assert arrivals[0].message == AbortRequest(["x"])
        nursery.cancel_scope.cancel()
        rig.links.close(0)


@pytest.mark.parametrize(("is_paused", "num_unread"), [(False, 1), (True, 0)])
async def test_requests_are_read_slowly_only_where_others_run(
    mock_clock: MockClock, is_paused: bool, num_unread: int
) -> None:
    network = SlowNetwork(mock_clock, 1e-4)
    rig = LoopRig(CONFIG, num_clients=1, launches_ahead=False)
    links = ClientLinks(network, b"\0\0", clock=time.monotonic, linger_s=FLUSH_TIMEOUT_S)
    addresses = EngineZmqAddresses(inputs=["memory://in"], outputs=["memory://out"])
    if is_paused:
        rig.core.pause(PauseMode.KEEP)
    num_old = CONFIG.max_num_seqs + LEAST_AMPLE_BACKLOG + 1
    rig.add(*(f"old {number}" for number in range(num_old)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.loop.run)
        await wait_all_tasks_blocked()
        await links.open(addresses, rig.loop, b"announced", readers=nursery, writers=nursery)
        for number in range(MAX_MESSAGES_PER_SLICE + 1):
            frames = RequestEncoder().encode(make_request(f"new {number}", [1, 2, 3]))
            network.peer("memory://in").send([bytes(frame) for frame in frames])
        await wait_all_tasks_blocked()
        unread = network.peer("memory://in").take_unread()
        nursery.cancel_scope.cancel()
        links.close(0)
    assert len(unread) == num_unread


async def test_closing_sends_what_is_left_and_ends_the_writers() -> None:
    async with open_links() as rig, trio.open_nursery() as readers:
        async with trio.open_nursery() as writers:
            await rig.links.open(
                rig.addresses, rig.rig.loop, b"announced", readers=readers, writers=writers
            )
            for outbox in rig.outboxes:
                outbox.refuse("x", FinishReason.ABORT)
                outbox.mark_dead()
            rig.links.close(5.0)
            rig.links.close(10.0)  # changes nothing
            await rig.links.wait_flushed()
        for socket in rig.outputs:
            assert (await socket.receive()) != [ENGINE_CORE_DEAD]
            assert (await socket.receive()) == [ENGINE_CORE_DEAD]
        readers.cancel_scope.cancel()


@pytest.mark.known_fault(kind="lost-last-words")
async def test_a_cancelled_engine_still_says_its_last_words() -> None:
    async with open_links() as rig:
        async with trio.open_nursery() as nursery:
            await rig.open(nursery)
            rig.outboxes[1].refuse("x", FinishReason.ABORT)
            nursery.cancel_scope.cancel()
            rig.links.close(5.0)
        assert await rig.outputs[1].receive()


@pytest.mark.known_fault(kind="lost-last-words")
async def test_a_client_that_never_reads_is_waited_for_so_long_and_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_links(linger_s=TEST_TIMEOUT_S) as rig:
        async with trio.open_nursery() as nursery:
            await rig.open(nursery)
            await fill_way_to_client_0(rig)
            for outbox in rig.outboxes:
                outbox.refuse("x", FinishReason.ABORT)
            nursery.cancel_scope.cancel()
            rig.links.close(TEST_TIMEOUT_S)
            with trio.CancelScope(shield=True):
                assert await rig.outputs[1].receive()  # the other is not held up
            started = trio.current_time()
            rig.links.close(FLUSH_TIMEOUT_S)
        assert FLUSH_TIMEOUT_S <= trio.current_time() - started < TEST_TIMEOUT_S / 2
        assert "outputs_dropped client=0" in caplog.text
        assert "client=1" not in caplog.text
        ended = trio.current_time()
    # Its linger is dropped: it has had its time.
    assert trio.current_time() - ended < TEST_TIMEOUT_S / 2


@pytest.mark.parametrize("leaves", ["before the end", "while it is waited for"])
async def test_a_client_that_has_left_is_not_waited_for(
    leaves: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_links(linger_s=TEST_TIMEOUT_S) as rig:
        with trio.fail_after(TEST_TIMEOUT_S / 2):
            async with trio.open_nursery() as nursery:
                await rig.open(nursery)
                await fill_way_to_client_0(rig)
                if leaves == "before the end":
                    rig.outputs[0].close()
                nursery.cancel_scope.cancel()
                rig.links.close(TEST_TIMEOUT_S)
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                    rig.outputs[0].close()
                    await rig.links.wait_flushed()
        assert "outputs_dropped" not in caplog.text
        closing = trio.current_time()
    assert trio.current_time() - closing < TEST_TIMEOUT_S / 2  # nothing lingers for it


async def test_an_address_that_cannot_be_used_is_a_mistake() -> None:
    async with open_links() as rig:
        rig.addresses.inputs[1] = "ipc://" + "x" * 200
        with pytest.RaisesGroup(ConfigError):
            async with trio.open_nursery() as nursery:
                try:
                    await rig.open(nursery)
                finally:
                    rig.links.close(1.0)


async def test_what_cannot_be_encoded_ends_its_writer_loudly() -> None:
    async with open_links() as rig:
        with pytest.RaisesGroup(ProtocolError):
            async with trio.open_nursery() as nursery:
                await rig.open(nursery)
                result = UtilityResult(None, object())
                rig.outboxes[0].put_utility_output(UtilityOutput(1, result=result))
                rig.links.flush(0)
                try:
                    await trio.sleep_forever()
                finally:
                    rig.links.close(1.0)
        await rig.links.wait_flushed()
