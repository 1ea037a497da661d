"""The tasks between sockets and the step loop: one reader and one writer for each client.

Engine. They move messages and decide nothing; what cannot be decoded is passed on as such.
"""

from __future__ import annotations

import contextlib
from time import perf_counter_ns
from typing import TYPE_CHECKING

import trio

from trio_engine.engine.inbox import Arrival
from trio_engine.wire.codec import OutputsEncoder, RequestDecoder, UndecodableRequest
from trio_engine.wire.messages import ENGINE_CORE_DEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_engine.core.outbox import Outbox
    from trio_engine.core.step_phases import StepPhases
    from trio_engine.engine.doorbell import Doorbell
    from trio_engine.engine.inbox import Inbox
    from trio_engine.transport.base import MessageSocket
    from trio_engine.wire.messages import Frames

# Messages decoded between two checkpoints, and their bytes: about 1 ms of work for the reader and
# then for the step loop, so that a burst of requests does not keep the device waiting.
MAX_MESSAGES_PER_SLICE = 32
MAX_BYTES_PER_SLICE = 16 << 10

# What a reader still takes when it is cancelled. Only a flood has more, and must not hold up the
# end.
MAX_LAST_MESSAGES = 1024


async def read_requests(
    socket: MessageSocket, outbox: Outbox, room: Doorbell, inbox: Inbox
) -> None:
    """Decodes what comes from one client and hands it to the step loop, for ever.

    While the client's outbox is full nothing more is read of it: each message would add to
    what it does not read. ``room`` is rung when the outbox was emptied.

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
            held = [decode(frames) for frames in messages]
            await wait_room()  # the outbox may have filled since the first look
            arrivals, held = held, []
            await inbox.put(arrivals)
    except trio.Cancelled:
        inbox.put_last(held)
        with contextlib.suppress(trio.WouldBlock, trio.ClosedResourceError):
            for _ in range(MAX_LAST_MESSAGES):
                inbox.put_last([decode(socket.receive_nowait())])
        raise


def next_limit(messages: Sequence[Frames]) -> int:
    """How many messages to take at once, if they are as large as the largest of the last ones."""
    largest = max(sum(map(len, frames)) for frames in messages)
    return max(1, min(MAX_MESSAGES_PER_SLICE, MAX_BYTES_PER_SLICE // max(1, largest)))


async def write_outputs(
    socket: MessageSocket,
    outbox: Outbox,
    doorbell: Doorbell,
    room: Doorbell,
    clock: Callable[[], float],
    phases: StepPhases,
) -> None:
    """Sends whatever is in a client's outbox, until the doorbell is closed.

    Rings ``room`` when all of it has been sent.

    The death notice, if there is one, is the last message.

    Cancellation: what was taken from the outbox and not sent is lost; only the deadline for the
    last words cancels a writer.
    """
    encoder = OutputsEncoder()

    async def send_all() -> None:
        is_timed = phases.is_timed  # of the turn that filled the outbox; another may come meanwhile
        for message in outbox.take(clock()):
            start = perf_counter_ns() if is_timed else 0
            frames = encoder.encode(message)
            encoded = perf_counter_ns() if is_timed else 0
            await _send(socket, frames)
            if is_timed:
                phases.note_message(outbox.client_index, start, encoded, perf_counter_ns())

    while True:
        try:
            await doorbell.wait()
        except trio.EndOfChannel:
            break
        await send_all()
        room.ring()
    await send_all()
    if outbox.is_dead:
        await _send(socket, [ENGINE_CORE_DEAD])


async def _send(socket: MessageSocket, frames: Frames) -> None:
    # Where there is room without a checkpoint, which would cost every step of a lone request a
    # turn of Trio's loop: the writer's wait for its doorbell is one.
    try:
        socket.send_nowait(frames)
    except trio.WouldBlock:
        await socket.send(frames)
