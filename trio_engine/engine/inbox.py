"""Decoded messages on their way from the readers to the step loop.

Engine. Not a memory channel: a reader that is cancelled in ``send`` would lose what it has taken
from its socket. Here it waits for room first, then takes and puts without a checkpoint between.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
import trio

from trio_engine.wire.codec import UndecodableRequest
from trio_engine.wire.messages import EngineCoreMessage

if TYPE_CHECKING:
    from trio_engine.engine.doorbell import Doorbell

# Lists of messages. The step loop empties the inbox each turn, so it fills only while one turn
# computes; readers then wait, and ZeroMQ holds the backlog. Each reader may have seen the last
# room, so there can be one list more for every client but one.
MAX_LISTS = 8


class Arrival(msgspec.Struct):
    """A message and the client by whose socket it came, or what could be read of a bad one."""

    client_index: int
    message: EngineCoreMessage | UndecodableRequest


class Inbox:
    """What readers put in and one step loop takes out.

    Args:
        doorbell: rung when something was put in.
    """

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._lists: deque[list[Arrival]] = deque()
        self._waiting = trio.lowlevel.ParkingLot()

    async def wait_room(self) -> None:
        """Returns when ``put`` is welcome. Cancellation: nothing is left behind."""
        await trio.lowlevel.checkpoint()
        while len(self._lists) >= MAX_LISTS:
            await self._waiting.park()

    def put(self, arrivals: list[Arrival]) -> None:
        """Adds messages in the order in which they came. Always takes them: see ``wait_room``."""
        self._lists.append(arrivals)
        self._doorbell.ring()

    def take(self) -> list[Arrival]:
        """Everything, oldest first; readers may go on."""
        arrivals = [arrival for some in self._lists for arrival in some]
        self._lists.clear()
        self._waiting.unpark_all()
        return arrivals
