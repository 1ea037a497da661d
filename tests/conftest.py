"""What every test gets: a leak guard, a temporary folder of the session's own, profiles."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from trio_engine.testing.leak_guard import take_snapshot, wait_leaks_gone

if TYPE_CHECKING:
    from collections.abc import Iterator

# Engines of tests run beside each other on few cores, where OpenMP's spinning threads take each
# other's time (trio_engine/executor/openmp.py). Read by torch, which nobody has imported yet.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# No deadline for one example: a busy machine is no fault of the code.
settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("soak", max_examples=10_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_configure() -> None:
    """Ctrl-C counts here and in child processes, also where a shell runs this in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_temporary_folder() -> Iterator[None]:
    """Other test processes must not show in the leak guard. Short, because sockets live there."""
    path = tempfile.mkdtemp(prefix="te-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", path)
        yield
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails the test that left a process, thread, context, socket or file behind."""
    before = take_snapshot()
    yield
    leaks = wait_leaks_gone(before)
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks))
