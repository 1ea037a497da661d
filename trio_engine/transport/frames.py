"""One multipart message into and out of a ZeroMQ socket, and who may touch its memory when.

Transport: imports zmq. Never waits; ``socket`` knows when to try.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio
import zmq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.wire.messages import Buffer, Frames

UNCOPIED_FRAME_BYTES = 64 << 10
"""From this size on, handing memory over is cheaper than copying it (pyzmq's own threshold)."""

_CLOSED_ERRNOS = (zmq.ETERM, zmq.ENOTSOCK)


def take_message(raw: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The next message, in ZeroMQ's memory.

    Raises:
        zmq.ZMQError: ``zmq.Again`` if there is none. Only the first frame can be missing:
            ZeroMQ delivers a message whole.
    """
    frames = [raw.recv(zmq.DONTWAIT, copy=False)]
    while frames[-1].more:
        frames.append(raw.recv(zmq.DONTWAIT, copy=False))
    return frames


def contents_of(message: Sequence[zmq.Frame]) -> Frames:
    """A message's bytes: of small frames a copy, of large ones a view of ZeroMQ's memory."""
    return [
        frame.bytes if len(frame) < UNCOPIED_FRAME_BYTES else frame.buffer.toreadonly()
        for frame in message
    ]


def connection_of(message: Sequence[zmq.Frame]) -> int:
    """The descriptor by which a message came."""
    connection = message[-1].get(zmq.SRCFD)  # the identity that a ROUTER puts first has none
    assert isinstance(connection, int)
    return connection


class MessageWriter:
    """Queues messages on one socket and remembers which memory ZeroMQ still reads from."""

    def __init__(self, raw: zmq.Socket[bytes]) -> None:
        self._raw = raw
        # One tracker for every uncopied frame, not for every message: pyzmq's tracker of a
        # message covers only its last frame. Bounded by the high-water mark.
        self._in_flight: deque[zmq.MessageTracker] = deque()

    @property
    def num_frames_in_flight(self) -> int:
        """Uncopied frames that ZeroMQ has not finished with."""
        return sum(not tracker.done for tracker in self._in_flight)

    def put(self, views: Sequence[memoryview]) -> None:
        """Queues a message of flat ``views``, at least one.

        Raises:
            zmq.ZMQError: nothing was queued: ZeroMQ looks at the mark, and for the peer, only at
                the first frame of a message.
        """
        for view in views[:-1]:
            self._put_frame(view, zmq.DONTWAIT | zmq.SNDMORE)
        self._put_frame(views[-1], zmq.DONTWAIT)

    def _put_frame(self, view: memoryview, flags: int) -> None:
        # Read-only is how a caller says that the memory will not change any more.
        if view.nbytes < UNCOPIED_FRAME_BYTES or not view.readonly:
            self._raw.send(view, flags, copy=True)
            return
        tracker = self._raw.send(view, flags, copy=False, track=True)
        self._forget_sent_frames()
        self._in_flight.append(tracker)

    def _forget_sent_frames(self) -> None:
        # Frames to one peer leave in order; with several peers one that is stuck may hide later
        # ones for a while, which costs a few small objects.
        while self._in_flight and self._in_flight[0].done:
            self._in_flight.popleft()


def flat_views(frames: Sequence[Buffer]) -> list[memoryview]:
    """The frames as bytes, without a copy.

    All that can be wrong with a frame comes up here, before the first one is handed over: half a
    message would be glued to the next one.

    Raises:
        TypeError: a frame is not a contiguous buffer.
        ValueError: there is no frame.
    """
    if not frames:
        raise ValueError("a message has at least one frame")
    return [_flat(memoryview(frame)) for frame in frames]


def _flat(view: memoryview) -> memoryview:
    return view.cast("B") if view.nbytes else memoryview(b"")


def translated(error: zmq.ZMQError) -> Exception:
    """The error that leaves transport in place of ZeroMQ's."""
    if error.errno in _CLOSED_ERRNOS:
        return trio.ClosedResourceError(f"this socket was closed: {error}")
    return trio.BrokenResourceError(str(error))
