"""The sending half of a client: outboxes, their doorbell, and the writer.

Callers post without waiting; one task hands what they posted to whatever carries it.
"""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING

import trio

from trio_engine.client.outbox import Outbox
from trio_engine.errors import ProtocolError, RequestError
from trio_engine.wire.codec import RequestEncoder
from trio_engine.wire.messages import AbortRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_engine.wire.messages import EngineCoreMessage, Frames


class MessageSender(abc.ABC):
    """Messages from callers to engines. ``run`` is its one task.

    Args:
        engine_indices: the engines.
    """

    def __init__(self, engine_indices: Iterable[int]) -> None:
        self._outboxes = {index: Outbox() for index in engine_indices}
        self._encoder = RequestEncoder()
        # Capacity 1: a ring says "look at the outboxes", and a second one would say it again.
        self._bell, self._rings = trio.open_memory_channel[None](1)
        self._ended = trio.Event()

    @property
    def num_unsent(self) -> int:
        """Messages and aborts that have not left yet."""
        return sum(len(outbox) for outbox in self._outboxes.values())

    def post(self, engine_index: int, key: str | int, message: EngineCoreMessage) -> None:
        """Encodes a message and puts it in the engine's outbox, or raises and leaves nothing.

        Encoded here and not by the writer, so that a fault is its caller's and later changes
        to the caller's objects have no effect.

        Raises:
            RequestError: the message holds something that has no wire form.
        """
        try:
            frames = self._encoder.encode(message)
        except ProtocolError as error:
            raise RequestError(str(error)) from error
        self._outboxes[engine_index].append(key, [_settled(frame) for frame in frames])
        self._ring()

    def withdraw(self, engine_index: int, key: int) -> None:
        """Takes back a utility call that has not left yet."""
        self._outboxes[engine_index].withdraw(key)

    def abort(self, engine_index: int, request_id: str) -> None:
        """Takes back a request, or posts its ABORT if it has left."""
        self._outboxes[engine_index].abort(request_id)
        self._ring()

    def close(self) -> None:
        """Lets ``run`` end once it has sent what was posted; nothing may be posted after."""
        self._bell.close()

    def discard(self) -> None:
        """Drops what was posted and closes: there is nobody to send it to."""
        for outbox in self._outboxes.values():
            outbox.clear()
        self.close()

    async def wait_ended(self) -> None:
        """Waits until ``run`` has ended."""
        await self._ended.wait()

    async def run(self) -> None:
        """Sends what is posted until ``close``.

        Raises:
            Exception: a message could not be carried; callers' engine is gone.

        Cancellation: what was not sent stays in the outboxes and is lost with them.
        """
        try:
            with self._rings:
                async for _ in self._rings:
                    for index, outbox in self._outboxes.items():
                        await self._empty(index, outbox)
        finally:
            self._ended.set()

    @abc.abstractmethod
    async def _send(self, engine_index: int, frames: Frames) -> None:
        """Carries one message away, or raises and ``run`` ends."""

    async def _empty(self, engine_index: int, outbox: Outbox) -> None:
        while True:
            if aborts := outbox.pop_aborts():
                await self._send(engine_index, self._encoder.encode(AbortRequest(aborts)))
            elif (frames := outbox.pop()) is not None:
                await self._send(engine_index, frames)
            else:
                return

    def _ring(self) -> None:
        # It rings already, or ``run`` has ended with its engine: then whoever noticed that looks
        # for the reason, for a moment, before it fails everything that waits.
        with contextlib.suppress(
            trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError
        ):
            self._bell.send_nowait(None)


def _settled(frame: bytes | memoryview) -> bytes | memoryview:
    """The frame, or a copy if its memory is the caller's: an array that is not part of the body."""
    if isinstance(frame, memoryview) and not frame.readonly:
        return bytes(frame)
    return frame
