"""What the client has not yet handed to ZeroMQ, and may therefore still take back.

Pure: no await can come between a caller's decision and its place in here, which is why leaving a
stream's block can promise an ABORT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trio_engine.wire.messages import Frames


class Outbox:
    """Messages to one engine: ABORTs first, then ADDs and utility calls in the caller's order.

    A message leaves by ``pop`` one at a time, so that whatever waits behind a blocked send can
    be withdrawn. An ABORT never needs to stand behind its own ADD: if that is still here it is
    withdrawn and nothing is aborted. ABORTs go first because they free what the others wait for.

    Not bounded by itself: each message belongs to an open stream or a pending utility call, each
    abort to a request that was sent, and callers bound these (``max_in_flight``).
    """

    def __init__(self) -> None:
        # Key: a request's id (str) or a utility call's (int). Value: the message, encoded when
        # its caller made it, so that later changes to the caller's objects cannot reach it.
        self._messages: dict[str | int, Frames] = {}
        self._aborts: list[str] = []

    def __len__(self) -> int:
        return len(self._messages) + len(self._aborts)

    def append(self, key: str | int, frames: Frames) -> None:
        """Puts an encoded ADD or UTILITY message at the end."""
        self._messages[key] = frames

    def withdraw(self, key: str | int) -> bool:
        """Takes a message back; False if it has left already."""
        return self._messages.pop(key, None) is not None

    def abort(self, request_id: str) -> None:
        """Withdraws the request's ADD, or asks the engine to end it where it has left already."""
        if not self.withdraw(request_id):
            self._aborts.append(request_id)

    def pop_aborts(self) -> list[str]:
        """All request ids to abort, for one ABORT message; empty if there are none."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def pop(self) -> Frames | None:
        """The oldest ADD or UTILITY message, or None."""
        if not self._messages:
            return None
        return self._messages.pop(next(iter(self._messages)))

    def clear(self) -> None:
        """Drops everything: the engine is gone."""
        self._messages.clear()
        self._aborts.clear()
