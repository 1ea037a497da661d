"""Posting and aborting while the connection that would carry it is gone."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_engine.client.sender import MessageSender
from trio_engine.wire.messages import Frames, UtilityCall


class GoneSender(MessageSender):
    """Finds its engine gone at the first message."""

    async def _send(self, engine_index: int, frames: Frames) -> None:
        raise trio.BrokenResourceError("gone")


async def test_nothing_is_raised_between_the_end_of_the_connection_and_the_news_of_it() -> None:
    """The news carries the exit status, so it takes a moment; callers then get that."""
    sender = GoneSender([0])
    sender.post(0, 1, UtilityCall(0, 1, "a", []))
    with trio.fail_after(5), pytest.RaisesGroup(trio.BrokenResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run)
            await sender.wait_ended()
    sender.post(0, "r", UtilityCall(0, 2, "a", []))
    sender.abort(0, "r")
    sender.abort(0, "another")
    sender.discard()
    sender.abort(0, "later")
    assert sender.num_unsent == 1
    await wait_all_tasks_blocked()


class KeepingSender(MessageSender):
    """Keeps what it carries."""

    def __init__(self) -> None:
        super().__init__([0])
        self.sent: list[Frames] = []

    async def _send(self, engine_index: int, frames: Frames) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(frames)


@pytest.mark.known_fault(kind="overwritten-buffer")
async def test_an_array_that_is_changed_before_its_message_leaves_goes_as_it_was() -> None:
    """Large ones are not part of a message's body, but frames beside it."""
    sender = KeepingSender()
    array = np.full(256, 7, np.float32)
    as_it_was = array.tobytes()
    sender.post(0, 1, UtilityCall(0, 1, "take", [array]))
    array[:] = 8
    sender.close()
    with trio.fail_after(5):
        await sender.run()
    ((_, _, frame),) = sender.sent
    assert bytes(frame) == as_it_was
