"""Contexts end within the linger of their sockets; addresses that cannot work are named."""

from __future__ import annotations

import os
import socket as sockets
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_engine.errors import ConfigError
from trio_engine.transport import ipc
from trio_engine.transport.context import open_context
from trio_engine.transport.ipc import IpcDirectory, remove_abandoned
from trio_engine.transport.socket import SocketKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def test_leaving_the_block_wakes_waiting_tasks_and_closes_sockets() -> None:
    async def receive() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await pull.receive()

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery, open_context() as context:
            pull = context.socket(SocketKind.PULL)
            nursery.start_soon(receive)
            await wait_all_tasks_blocked()
    assert pull.statistics().closed
    with pytest.raises(trio.ClosedResourceError):
        context.socket(SocketKind.PULL)
    await context.aclose()
    assert repr(pull) == "<ZmqSocket PULL closed>"


async def test_leaving_the_block_waits_for_no_thread_of_a_service() -> None:
    limiter = trio.to_thread.current_default_thread_limiter()
    closed = trio.Event()

    async def open_and_close() -> None:
        async with open_context() as context:
            context.socket(SocketKind.PULL)
        closed.set()

    async with trio.open_nursery() as nursery:
        for _ in range(int(limiter.available_tokens)):
            limiter.acquire_on_behalf_of_nowait(object())
        nursery.start_soon(open_and_close)
        with trio.move_on_after(5):
            await closed.wait()
        in_time = closed.is_set()
        limiter.total_tokens += 1  # else a failure could not end: the wait is shielded
    assert in_time


def test_plain_block_works_outside_of_trio(tmp_path: Path) -> None:
    with open_context() as context:
        pull = context.socket(SocketKind.PULL)
        push = context.socket(SocketKind.PUSH)
        push.connect(pull.bind(f"ipc://{tmp_path}/s"))
        push.send_nowait([b"x"])
        assert repr(pull) == "<ZmqSocket PULL open>"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("linger_s", [0.0, 0.2])
async def test_unsent_messages_hold_the_end_for_the_linger_and_no_longer(linger_s: float) -> None:
    with trio.fail_after(10):
        async with open_context() as context:
            push = context.socket(SocketKind.PUSH, linger_s=linger_s)
            push.connect("tcp://127.0.0.1:9")  # nobody listens on the discard port
            await push.send([b"x"])
            start = time.monotonic()
        assert linger_s * 0.9 <= time.monotonic() - start < linger_s + 2


@pytest.mark.known_fault(kind="lost-last-words")
async def test_end_of_a_context_is_bounded_with_a_peer_that_does_not_read() -> None:
    with trio.fail_after(10):
        async with open_context() as reader:
            pull = reader.socket(SocketKind.PULL, receive_hwm=1)
            address = pull.bind("tcp://127.0.0.1:0")
            async with open_context() as writer:
                push = writer.socket(SocketKind.PUSH, linger_s=0.2)
                push.connect(address)
                for _ in range(5):
                    await push.send([bytes(8 << 20)])
                start = time.monotonic()
            assert time.monotonic() - start < 2


@pytest.mark.known_fault(kind="lost-last-words")
async def test_last_words_arrive_although_the_context_ends_at_once() -> None:
    with trio.fail_after(10):
        async with open_context() as reader:
            pull = reader.socket(SocketKind.PULL)
            address = pull.bind("tcp://127.0.0.1:0")
            async with open_context() as writer:
                push = writer.socket(SocketKind.PUSH, linger_s=5)
                push.connect(address)
                push.send_nowait([b"last words"])
            assert await pull.receive() == [b"last words"]


async def test_end_of_a_context_is_not_cut_short_by_cancellation() -> None:
    with trio.CancelScope() as scope:
        async with open_context() as context:
            context.socket(SocketKind.PULL)
            scope.cancel()
    with pytest.raises(trio.ClosedResourceError):
        context.socket(SocketKind.PULL)


def too_long(directory: Path) -> str:
    return f"ipc://{directory}/" + "x" * (107 - len(str(directory)))


@pytest.mark.known_fault(kind="bad-address")
@pytest.mark.parametrize(
    "address_in",
    [
        lambda _: "",
        lambda _: "127.0.0.1:1",
        lambda _: "http://127.0.0.1:1",
        lambda _: "ipc://",
        lambda _: "tcp://",
        lambda _: "tcp://127.0.0.1",
        lambda _: "tcp://127.0.0.1:port",
        lambda _: "tcp://127.0.0.1:65536",
        lambda _: "tcp://127.0.0.1:" + "9" * 5000,
        lambda _: "tcp://127.0.0.1:0\0",
        lambda _: "ipc:///\ud800",
        lambda _: "tcp://[::1:80",
        lambda _: "tcp://::1:80",
        too_long,
    ],
)
@pytest.mark.parametrize("how", ["bind", "connect"])
def test_bad_address_is_named(tmp_path: Path, address_in: Callable[[Path], str], how: str) -> None:
    address = address_in(tmp_path)
    with open_context() as context, pytest.raises(ConfigError) as caught:
        getattr(context.socket(SocketKind.PULL), how)(address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("port", ["0", "*"])
def test_a_port_yet_to_be_picked_can_only_be_bound(port: str) -> None:
    with open_context() as context:
        assert context.socket(SocketKind.PULL).bind(f"tcp://127.0.0.1:{port}")[-2:] != ":0"
        with pytest.raises(ConfigError, match="port must be 1 to 65535"):
            context.socket(SocketKind.PULL).connect(f"tcp://127.0.0.1:{port}")


@pytest.mark.known_fault(kind="bad-address")
def test_longest_ipc_path_works(tmp_path: Path) -> None:
    with open_context() as context:
        address = too_long(tmp_path)[:-1]
        assert context.socket(SocketKind.PULL).bind(address) == address


def test_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    with open_context() as context:
        pull = context.socket(SocketKind.PULL)
        for address in (f"ipc://{tmp_path}/absent/s", "tcp://192.0.2.1:0"):
            with pytest.raises(ConfigError, match=address):
                pull.bind(address)


@pytest.mark.known_fault(kind="bad-address")
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "ipc://{}/s"])
def test_address_in_use_is_refused(tmp_path: Path, address: str) -> None:
    """ZeroMQ alone would take the socket file of a live listener."""
    with open_context() as context:
        taken = context.socket(SocketKind.PULL).bind(address.format(tmp_path))
        with pytest.raises(ConfigError, match="cannot use address"):
            context.socket(SocketKind.PULL).bind(taken)


def test_listener_that_is_busy_is_alive(tmp_path: Path) -> None:
    with sockets.socket(sockets.AF_UNIX) as listener, sockets.socket(sockets.AF_UNIX) as first:
        listener.bind(f"{tmp_path}/s")
        listener.listen(0)
        first.connect(f"{tmp_path}/s")  # fills the backlog
        with open_context() as context, pytest.raises(ConfigError, match="listens"):
            context.socket(SocketKind.PULL).bind(f"ipc://{tmp_path}/s")


@pytest.mark.known_fault(kind="bad-address")
async def test_socket_file_that_a_crash_left_is_replaced(tmp_path: Path) -> None:
    with sockets.socket(sockets.AF_UNIX) as crashed:
        crashed.bind(f"{tmp_path}/s")
    assert os.listdir(tmp_path) == ["s"]
    with trio.fail_after(5):
        async with open_context() as context:
            pull = context.socket(SocketKind.PULL)
            push = context.socket(SocketKind.PUSH)
            push.connect(pull.bind(f"ipc://{tmp_path}/s"))
            await push.send([b"x"])
            assert await pull.receive() == [b"x"]


def has_ipv6() -> bool:
    try:
        with sockets.socket(sockets.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
async def test_ipv6_literal_works() -> None:
    with trio.fail_after(5):
        async with open_context() as context:
            pull = context.socket(SocketKind.PULL)
            push = context.socket(SocketKind.PUSH)
            push.connect(pull.bind("tcp://[::1]:0"))
            await push.send([b"x"])
            assert await pull.receive() == [b"x"]


@pytest.mark.parametrize(
    "options",
    [
        {"linger_s": -1},
        {"linger_s": float("inf")},
        {"linger_s": float("nan")},
        {"send_hwm": -1},
        {"receive_hwm": -1},
        {"send_hwm": 1},
        {"identity": b""},
        {"identity": bytes(256)},
        {"buffer_bytes": -2},
    ],
)
def test_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with open_context() as context, pytest.raises(ConfigError):
        context.socket(SocketKind.ROUTER, **options)


def test_ipc_directory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not pytest's folder, whose path may be too long for a socket in it.
    parent = tempfile.mkdtemp(prefix="te-", dir="/tmp")
    monkeypatch.setenv("TMPDIR", parent)
    with IpcDirectory() as directory, open_context() as context:
        assert os.path.dirname(directory.path) == parent
        assert os.stat(directory.path).st_mode & 0o777 == 0o700
        context.socket(SocketKind.PULL).bind(directory.address("in"))
        assert os.listdir(directory.path) == ["in"]
    assert os.listdir(parent) == []
    os.rmdir(parent)


@pytest.mark.parametrize("name", ["", "x" * 25])
def test_name_of_an_endpoint_is_short(name: str) -> None:
    with IpcDirectory() as directory, pytest.raises(ConfigError):
        directory.address(name)


@pytest.mark.known_fault(kind="bad-address")
@pytest.mark.parametrize("where", ["/absent", "/proc", "too long"])  # nobody writes to /proc
def test_ipc_directory_avoids_what_is_too_long_or_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "too long":
        where = str(tmp_path / ("x" * 80))
        os.mkdir(where)
    monkeypatch.setenv("TMPDIR", where)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with IpcDirectory() as directory, open_context() as context:
        assert not directory.path.startswith(where)
        context.socket(SocketKind.PULL).bind(directory.address("x" * 24))


@pytest.mark.known_fault(kind="bad-address")
def test_no_place_for_an_ipc_directory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/absent")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/gone")
    monkeypatch.setattr(ipc, "_FALLBACKS", ("/lost",))
    with pytest.raises(ConfigError, match=r"absent.*gone.*lost"):
        IpcDirectory()


def test_an_abandoned_directory_of_ours_is_removed_and_no_other(tmp_path: Path) -> None:
    ours, other = tmp_path / "trio-engine-x", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
        (folder / "in").touch()
    for address in (f"ipc://{ours}/in", f"ipc://{other}/in", "tcp://127.0.0.1:1"):
        remove_abandoned(address)
    assert list(tmp_path.iterdir()) == [other]
