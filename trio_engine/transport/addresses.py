"""Checks of endpoint addresses that ZeroMQ makes late, vaguely, or not at all.

Transport, without zmq.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket

from trio_engine.errors import ConfigError

MAX_IPC_PATH_BYTES = 107
"""sockaddr_un holds 108 bytes with the closing zero."""

MAX_PORT = 65535

_IPC = "ipc://"
_FORMS = re.compile(
    r"""ipc://[^\0]+
    | inproc://[^\0]+
    | tcp://([^;\0]+;)?                  # source
      (\[[^]\0]+\] | [^][:\0]+)          # [IPv6] or host
      :(?P<port>[0-9]{1,9} | \*)
    """,
    re.VERBOSE | re.DOTALL,
)


def check_address(address: str) -> None:
    """Refuses what can never be bound or connected.

    Raises:
        ConfigError: not of a form that ZeroMQ knows, not a port, or an ``ipc://`` path that is
            too long.
    """
    port = _port_of(address)
    if port is not None and port > MAX_PORT:
        raise ConfigError(f"port must be at most {MAX_PORT}, got {address!r}")
    if not address.startswith(_IPC):
        return
    # The bytes that ZeroMQ gets; replaced characters count, and are refused by it later.
    length = len(address.removeprefix(_IPC).encode(errors="replace"))
    if length > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"path of {address!r} has {length} bytes, a socket's path at most {MAX_IPC_PATH_BYTES}"
        )


def check_target(address: str) -> None:
    """``check_address``, and refuses what nobody can connect to: a port that is yet to be picked.

    Raises:
        ConfigError: as ``check_address``, or the port is 0 or ``*``.
    """
    check_address(address)
    if _port_of(address) == 0:
        raise ConfigError(f"port must be 1 to {MAX_PORT}, got {address!r}")


def needs_ipv6(address: str) -> bool:
    """Whether the host is an IPv6 literal, which ZeroMQ takes only with its IPv6 option."""
    return address.startswith("tcp://[")


def check_ipc_is_free(address: str) -> None:
    """Refuses to take a live listener's socket file.

    ZeroMQ removes whatever file is there before it binds. That is right for what a crash left,
    but would silently cut off an engine that is running.

    Raises:
        ConfigError: somebody listens there.
    """
    if not address.startswith(_IPC):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.removeprefix(_IPC))
        except BlockingIOError:
            pass  # a listener with a full backlog
        except (OSError, UnicodeError):
            return
    raise ConfigError(f"cannot use address {address!r}: somebody listens there")


def _port_of(address: str) -> int | None:
    """None if an address of that form has none."""
    form = _FORMS.fullmatch(address)
    if form is None:
        raise ConfigError(f"address must be ipc://PATH or tcp://HOST:PORT, got {address!r}")
    port = form["port"]
    return int(port.replace("*", "0")) if port else None


def remove_socket_file(endpoint: str) -> None:
    """Removes the file of an endpoint that is about to close, which ZeroMQ leaves behind."""
    if endpoint.startswith(_IPC):
        with contextlib.suppress(OSError):
            os.unlink(endpoint.removeprefix(_IPC))
