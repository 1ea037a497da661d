"""Commands of engines of any make, with places for the address that they are to connect to.

Pure. For whatever starts an engine by a command that it did not write itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HANDSHAKE = "{handshake}"
"""Becomes the address where the front end's handshake is bound."""

PORT = "{port}"
"""Becomes its port on 127.0.0.1; the front end's sockets are TCP ones then."""


def uses_port(command: Sequence[str]) -> bool:
    """Whether a command wants a port in place of an address."""
    return any(PORT in word for word in command)


def fill_in(command: Sequence[str], handshake_address: str) -> list[str]:
    """The command with the address in the place of ``{handshake}``, and its port of ``{port}``."""
    port = handshake_address.rpartition(":")[2]
    return [word.replace(HANDSHAKE, handshake_address).replace(PORT, port) for word in command]
