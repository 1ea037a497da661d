"""Where the reader of a request waits: one place for all of its answers.

State is on Trio's thread and complete between any two checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.client.mailbox import Mailbox
    from trio_engine.client.outputs import RequestOutput


class MailboxReader:
    """Takes items out of mailboxes, in turn where several have one.

    Args:
        mailboxes: one for each answer; from now on they wake this reader and no other.
    """

    def __init__(self, mailboxes: Sequence[Mailbox]) -> None:
        self._mailboxes = mailboxes
        self._next = 0
        self._is_read = False  # a task is in ``receive``
        self._wakeup: trio.Event | None = None
        for mailbox in mailboxes:
            mailbox.on_ready = self._wake

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come (there may be something left to take)."""
        return all(mailbox.is_ended for mailbox in self._mailboxes)

    @property
    def is_exhausted(self) -> bool:
        """Whether the last item of each answer has been taken."""
        return all(mailbox.is_exhausted for mailbox in self._mailboxes)

    async def receive(self) -> RequestOutput:
        """Waits for the next item. Not to be called once ``is_exhausted``.

        Raises:
            trio.BusyResourceError: another task is in here.
            Exception: what an answer failed with; the others may go on.

        Cancellation: nothing is taken.
        """
        if self._is_read:
            raise trio.BusyResourceError("another task is reading this stream")
        self._is_read = True
        try:
            if self._is_ready:
                await trio.lowlevel.checkpoint()
            else:
                self._wakeup = trio.Event()
                await self._wakeup.wait()
        finally:
            self._is_read = False
            self._wakeup = None
        return self._take()

    @property
    def _is_ready(self) -> bool:
        return any(mailbox.is_ready for mailbox in self._mailboxes)

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    def _take(self) -> RequestOutput:
        """The next item in turn: one busy answer must not keep the others from being read."""
        count = len(self._mailboxes)
        turns = ((self._next + offset) % count for offset in range(count))
        index = next(index for index in turns if self._mailboxes[index].is_ready)
        self._next = (index + 1) % count
        return self._mailboxes[index].take()
