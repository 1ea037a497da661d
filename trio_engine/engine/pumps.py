"""The tasks between sockets and the step loop: one reader and one writer for each client.

Engine. They move messages and decide nothing; what cannot be decoded is passed on as such.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING

import trio

from trio_engine.engine.doorbell import Doorbell
from trio_engine.engine.inbox import Arrival
from trio_engine.requests import EngineCoreRequest
from trio_engine.wire.codec import OutputsEncoder, RequestDecoder, UndecodableRequest
from trio_engine.wire.messages import ENGINE_CORE_DEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_engine.core.outbox import Outbox
    from trio_engine.core.step_phases import StepPhases
    from trio_engine.engine.inbox import Inbox
    from trio_engine.outputs import EngineCoreOutputs
    from trio_engine.transport.base import MessageSocket
    from trio_engine.wire.messages import Frames

# Messages decoded between two checkpoints, and their bytes: about 1 ms of work for the reader and
# then for the step loop, so that a burst of requests does not keep the device waiting.
MAX_MESSAGES_PER_SLICE = 32
MAX_BYTES_PER_SLICE = 16 << 10

# What a reader still takes when it is cancelled, however long it takes: all that ZeroMQ holds of a
# client (1,000 by its high-water mark). A flood has more, which then comes in for a while only.
MAX_LAST_MESSAGES = 1024


async def read_requests(
    socket: MessageSocket,
    outbox: Outbox,
    room: Doorbell,
    inbox: Inbox,
    is_backed_up: Callable[[], bool],
) -> None:
    """Decodes what comes from one client and hands it to the step loop, for ever.

    While the client's outbox is full nothing more is read of it: each message would add to
    what it does not read. ``room`` is rung when the outbox was emptied. While ``is_backed_up``
    says that requests can only wait, they are read slowly, so that running ones are not slow.

    Cancellation: whatever had arrived is in the inbox, so that every request there is answered.
    """
    client_index = outbox.client_index
    decoder = RequestDecoder()
    held: list[Arrival] = []
    limit = MAX_MESSAGES_PER_SLICE

    async def wait_room() -> None:
        while outbox.is_full:
            await room.wait()

    def decode(frames: Frames) -> Arrival:
        try:
            return Arrival(client_index, decoder.decode(frames))
        except UndecodableRequest as error:
            return Arrival(client_index, error)

    try:
        while True:
            await wait_room()
            messages = await socket.receive_many(limit)
            limit = next_limit(messages)
            start_s = trio.current_time()
            held = [decode(frames) for frames in messages]
            decoding_s = trio.current_time() - start_s
            await wait_room()  # the outbox may have filled since the first look
            arrivals, held = held, []
            await inbox.put(arrivals)
            if is_backed_up() and any(map(_is_add, arrivals)):
                await inbox.rest(decoding_s)
    except trio.Cancelled:
        inbox.put_last(held)
        with contextlib.suppress(trio.WouldBlock, trio.ClosedResourceError):
            for number in itertools.count():
                if number >= MAX_LAST_MESSAGES and inbox.is_time_up():
                    break
                inbox.put_last([decode(socket.receive_nowait())])
        raise


def _is_add(arrival: Arrival) -> bool:
    return isinstance(arrival.message, EngineCoreRequest)


def next_limit(messages: Sequence[Frames]) -> int:
    """How many messages to take at once, if they are as large as the largest of the last ones."""
    largest = max(sum(map(len, frames)) for frames in messages)
    return max(1, min(MAX_MESSAGES_PER_SLICE, MAX_BYTES_PER_SLICE // max(1, largest)))


class OutputWriter:
    """Sends what is in a client's outbox: at once where there is room, else in a task that waits.

    The task alone would do, but to wake it for each message costs as much as the message.

    Args:
        socket: to the client.
        outbox: of the client.
        clock: of message timestamps.
        phases: is told how long messages take.

    Attributes:
        room: rung when all has been sent, if a reader waits for that.
    """

    def __init__(
        self,
        socket: MessageSocket,
        outbox: Outbox,
        clock: Callable[[], float],
        phases: StepPhases,
    ) -> None:
        self.room = Doorbell()
        self._socket = socket
        self._outbox = outbox
        self._clock = clock
        self._phases = phases
        self._encoder = OutputsEncoder()
        self._doorbell = Doorbell()
        # Taken from the outbox; the oldest is the next to send.
        self._unsent: deque[EngineCoreOutputs] = deque()
        # Whether the task sends: what comes meanwhile merges in the outbox until it looks again.
        self._is_held = False
        self._failure: Exception | None = None

    def flush(self) -> None:
        """Sends what is in the outbox, as far as there is room; the task does the rest.

        Whatever is wrong with a message or the socket comes up in the task.
        """
        if self._is_held:
            return
        try:
            self._flush()
        except trio.WouldBlock:
            self._doorbell.ring()
        except Exception as error:
            self._failure = error
            self._doorbell.ring()

    def close(self) -> None:
        """Lets ``run`` end when all is sent."""
        self._doorbell.close()

    async def run(self) -> None:
        """Sends what ``flush`` could not, until closed.

        The death notice, if there is one, is the last message.

        Raises:
            ProtocolError: a message cannot be encoded.
            trio.BrokenResourceError: the client cannot be reached any more.

        Cancellation: what was taken from the outbox and not sent is lost; only the deadline for the
        last words cancels a writer.
        """
        while True:
            try:
                await self._doorbell.wait()
            except trio.EndOfChannel:
                break
            self._is_held = True
            await self._send_all()
            self._is_held = False
        self._is_held = True  # for good: nothing may follow the death notice
        await self._send_all()
        if self._outbox.is_dead:
            await self._socket.send([ENGINE_CORE_DEAD])

    async def _send_all(self) -> None:
        if self._failure is not None:
            raise self._failure
        while True:
            try:
                self._flush()
            except trio.WouldBlock:
                # Not timed: how long a client does not read is no cost of a step.
                await self._socket.send(self._encoder.encode(self._unsent[0]))
                self._unsent.popleft()
            else:
                return

    def _flush(self) -> None:
        """Raises trio.WouldBlock where the oldest unsent message must wait."""
        self._send_unsent()  # what waited is older than what is in the outbox
        self._unsent.extend(self._outbox.take(self._clock()))
        self._send_unsent()
        if self.room.is_awaited:
            self.room.ring()

    def _send_unsent(self) -> None:
        while self._unsent:
            self._send_oldest()
            self._unsent.popleft()

    def _send_oldest(self) -> None:
        if not self._phases.is_timed:
            self._socket.send_nowait(self._encoder.encode(self._unsent[0]))
            return
        start = perf_counter_ns()
        frames = self._encoder.encode(self._unsent[0])
        encoded = perf_counter_ns()
        self._socket.send_nowait(frames)
        self._phases.note_message(self._outbox.client_index, start, encoded, perf_counter_ns())
