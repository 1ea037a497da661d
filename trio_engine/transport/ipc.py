"""Private ``ipc://`` endpoints: a directory that is short enough, and gone afterwards.

Transport, without zmq.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Self

from trio_engine.errors import ConfigError
from trio_engine.transport.addresses import MAX_IPC_PATH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NAME_BYTES = 24
_PREFIX = "trio-engine-"
_RANDOM_BYTES = 8  # of tempfile.mkdtemp
_FALLBACKS = ("/tmp", "/var/tmp", "/dev/shm")


class IpcDirectory:
    """A directory for socket files that only this user can enter, as a ``with`` block.

    It lies where ``TMPDIR`` says, or where there is room when that is too long for a socket's
    path or cannot be written.

    Raises:
        ConfigError: no directory for temporary files is writable and short enough.
    """

    def __init__(self) -> None:
        self._path = _make_directory()

    @property
    def path(self) -> str:
        """Where it lies, until the block is left."""
        return self._path

    def address(self, name: str) -> str:
        """The endpoint of that name (at most 24 bytes) in this directory."""
        if not 0 < len(os.fsencode(name)) <= MAX_NAME_BYTES:
            raise ConfigError(f"name of an endpoint must have 1 to 24 bytes, got {name!r}")
        return f"ipc://{self._path}/{name}"

    def close(self) -> None:
        """Removes the directory and what is in it. Close its sockets first."""
        shutil.rmtree(self._path, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_abandoned(address: str) -> None:
    """Removes the socket directory of an owner that was killed and could not do it itself.

    ``address`` is one of its endpoints; any that is not in a directory of ours is left alone.
    """
    scheme, _, path = address.partition("://")
    directory = os.path.dirname(path)
    if scheme == "ipc" and os.path.basename(directory).startswith(_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def _make_directory() -> str:
    for parent in _candidates():
        needed = len(os.fsencode(parent)) + len(_PREFIX) + _RANDOM_BYTES + MAX_NAME_BYTES + 2
        if needed > MAX_IPC_PATH_BYTES:
            continue
        try:
            return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError:
            continue
    raise ConfigError(f"no writable and short directory for sockets among {list(_candidates())}")


def _candidates() -> Iterator[str]:
    # Not tempfile.gettempdir(): it remembers its first answer for the life of the process.
    for variable in ("TMPDIR", "XDG_RUNTIME_DIR"):
        if path := os.environ.get(variable):
            yield os.path.abspath(path)
    yield from _FALLBACKS
