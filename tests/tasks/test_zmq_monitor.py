"""A connection's end is noticed while nobody sends, and only that one's."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_engine.transport.context import ZmqContext, open_context
from trio_engine.transport.ipc import IpcDirectory
from trio_engine.transport.monitor import ConnectionMonitor
from trio_engine.transport.socket import SocketKind, ZmqSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


TEST_TIMEOUT_S = 60.0
"""No test here waits for time to pass; this ends one that would hang."""


class Rig(NamedTuple):
    """A ROUTER that is monitored, and a peer by whose connection a message has come."""

    context: ZmqContext
    router: ZmqSocket
    address: str
    monitor: ConnectionMonitor
    peer: ZmqSocket
    connection: int


@asynccontextmanager
async def open_rig(kind: str) -> AsyncIterator[Rig]:
    with trio.fail_after(TEST_TIMEOUT_S), IpcDirectory() as directory:
        async with open_context() as context, trio.open_nursery() as nursery:
            router = context.socket(SocketKind.ROUTER)
            monitor = router.monitor()
            nursery.start_soon(monitor.run)
            address = router.bind(directory.address("s") if kind == "ipc" else "tcp://127.0.0.1:0")
            peer, connection = await connect(context, router, address)
            yield Rig(context, router, address, monitor, peer, connection)
            router.close()


async def connect(context: ZmqContext, router: ZmqSocket, address: str) -> tuple[ZmqSocket, int]:
    peer = context.socket(SocketKind.DEALER)
    peer.connect(address)
    await peer.send([b"hello"])
    connection, frames = await router.receive_from()
    assert frames[1:] == [b"hello"]
    return peer, connection


@pytest.fixture(params=["ipc", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_peer_that_goes_without_a_word_is_noticed(kind: str) -> None:
    async with open_rig(kind) as rig, trio.open_nursery() as nursery:
        for _ in range(2):  # any number of tasks
            nursery.start_soon(rig.monitor.wait_closed, rig.connection)
        await wait_all_tasks_blocked()
        rig.peer.close()


async def test_one_that_has_gone_already_is_not_waited_for(kind: str) -> None:
    async with open_rig(kind) as rig:
        rig.peer.close()
        await rig.monitor.wait_closed(rig.connection)
        await rig.monitor.wait_all_left()
        await rig.monitor.wait_closed(rig.connection)


async def test_other_peers_may_come_and_go(kind: str) -> None:
    async with open_rig(kind) as rig:
        for _ in range(3):
            other, connection = await connect(rig.context, rig.router, rig.address)
            other.close()
            await rig.monitor.wait_closed(connection)
        with trio.move_on_after(0.05) as scope:
            await rig.monitor.wait_closed(rig.connection)
        assert scope.cancelled_caught
        with trio.move_on_after(0.05) as scope:
            await rig.monitor.wait_all_left()
        assert scope.cancelled_caught
        rig.peer.close()
        await rig.monitor.wait_all_left()


async def test_a_stranger_that_does_not_speak_zeromq_is_not_the_peer() -> None:
    async with open_rig("tcp") as rig:
        host, _, port = rig.address.removeprefix("tcp://").rpartition(":")
        stranger = await trio.open_tcp_stream(host, int(port))
        await stranger.send_all(b"GET / HTTP/1.0\r\n\r\n" * 10)
        await stranger.aclose()
        await rig.peer.send([b"still here"])
        connection, _ = await rig.router.receive_from()
        assert connection == rig.connection
        with trio.move_on_after(0.05) as scope:
            await rig.monitor.wait_closed(rig.connection)
        assert scope.cancelled_caught


async def test_the_connecting_side_notices_it_too(kind: str) -> None:
    with trio.fail_after(TEST_TIMEOUT_S), IpcDirectory() as directory:
        async with open_context() as context, trio.open_nursery() as nursery:
            pull = context.socket(SocketKind.PULL)
            push = context.socket(SocketKind.PUSH)
            monitor = push.monitor()
            nursery.start_soon(monitor.run)
            push.connect(
                pull.bind(directory.address("s") if kind == "ipc" else "tcp://127.0.0.1:0")
            )
            await push.send([b"x"])
            await pull.receive()
            pull.close()
            await monitor.wait_all_left()
            push.close()


async def test_a_peer_that_goes_as_the_socket_is_closed_holds_up_nobody() -> None:
    """ZeroMQ's thread, which serves all sockets, must not wait to report it to a closed one."""
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_context() as context:
            pull, push = context.socket(SocketKind.PULL), context.socket(SocketKind.PUSH)
            push.connect(pull.bind("tcp://127.0.0.1:0"))
            for _ in range(100):
                router = context.socket(SocketKind.ROUTER)
                router.monitor()
                peer, _ = await connect(context, router, router.bind("tcp://127.0.0.1:0"))
                peer.close()
                router.close()
                await push.send([b"x"])
                await pull.receive()


async def test_closing_a_context_as_all_peers_go_is_safe_too() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        for _ in range(20):
            async with open_context() as ours, open_context() as theirs:
                for _ in range(4):
                    router = ours.socket(SocketKind.ROUTER)
                    router.monitor()
                    await connect(theirs, router, router.bind("tcp://127.0.0.1:0"))


async def test_closing_the_socket_ends_every_wait() -> None:
    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await rig.monitor.wait_closed(rig.connection)

    async with open_rig("ipc") as rig, trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        rig.router.close()
        nursery.start_soon(wait)
    with pytest.raises(trio.ClosedResourceError):
        rig.router.monitor()
