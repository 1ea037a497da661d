"""The leak guard sees each kind of leak, and nothing where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import trio
import zmq

from trio_engine.testing.leak_guard import find_leaks, guard_leaks, take_snapshot, wait_leaks_gone
from trio_engine.transport.ipc import IpcDirectory

if TYPE_CHECKING:
    from pathlib import Path


def test_nothing_left_is_no_leak() -> None:
    with guard_leaks():
        pass


def test_a_child_is_found_until_it_is_reaped() -> None:
    before = take_snapshot()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert any(leak.startswith(f"process {child.pid} ") for leak in find_leaks(before))
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert any(f"process {child.pid} (state Z)" in leak for leak in find_leaks(before))
    child.wait()
    assert wait_leaks_gone(before) == []


def test_a_child_that_was_there_before_is_none_whatever_it_does() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert child.stdin is not None
    before = take_snapshot()
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its state is another one now
    assert not any("process" in leak for leak in find_leaks(before))
    child.wait()


def test_a_thread_is_found() -> None:
    before = take_snapshot()
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="forgotten")
    thread.start()
    assert any("'forgotten'" in leak for leak in find_leaks(before))
    may_end.set()
    thread.join()
    assert wait_leaks_gone(before) == []


def test_an_idle_worker_of_trio_is_none() -> None:
    before = take_snapshot()
    trio.run(trio.to_thread.run_sync, time.monotonic)
    assert wait_leaks_gone(before) == []


def test_a_context_is_found_once_it_has_had_a_socket() -> None:
    before = take_snapshot()
    with zmq.Context() as context:
        context.socket(zmq.PULL).close(linger=0)
        # The thread gives itself its name, a moment after it has started.
        deadline = time.monotonic() + 5.0
        while not find_leaks(before) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [leak[:14] for leak in find_leaks(before)] == ["ZeroMQ context"]
    assert wait_leaks_gone(before) == []


def test_the_collector_of_pyzmq_is_none() -> None:
    before = take_snapshot()
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as r:
        left.bind("inproc://pair")
        r.connect("inproc://pair")
        left.send(bytes(1 << 20), copy=False)
        assert len(r.recv()) == 1 << 20
    assert wait_leaks_gone(before) == []


def test_a_pipe_is_found() -> None:
    before = take_snapshot()
    ends = os.pipe()
    assert len(find_leaks(before)) == 2
    for end in ends:
        os.close(end)
    assert find_leaks(before) == []


def test_a_socket_directory_is_found() -> None:
    before = take_snapshot()
    directory = IpcDirectory()
    assert find_leaks(before) == [f"file {directory.path}"]
    directory.close()
    assert find_leaks(before) == []


def test_the_guard_names_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    left = tmp_path / "trio-engine-x"
    with pytest.raises(AssertionError, match=f"left behind: file {left}"), guard_leaks(grace_s=0.0):
        left.mkdir()


def test_needs_neither_torch_nor_zmq_nor_pytest() -> None:
    code = (
        "import sys, trio_engine.testing.leak_guard, trio_engine.testing.wire_engine;"
        "print({'torch', 'zmq', 'pytest'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
