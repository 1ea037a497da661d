"""Requests that wait, by turn: cheap to join, to leave from anywhere, and to look at the first.

Pure.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_engine.core.request import Request, Turn

# A heap rebuilt below this size would cost more than what lies dead in it.
MIN_DEAD_ENTRIES = 64


class RequestQueue:
    """Ordered by ``Request.turn``, which must not change while a request is here.

    ``add`` and ``remove`` cost the logarithm of the length, ``peek`` next to nothing.

    Counterpart: ``vllm/v1/core/sched/request_queue.py``; there a request leaves the middle of a
    queue in time linear in its length.
    """

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        # Who is here, and the entry that stands for each. What a request leaves in the heap when
        # it is removed is dead: dropped when it comes up, or when half of the heap is dead.
        self._entries: dict[Request, tuple[Turn, Request]] = {}
        self._heap: list[tuple[Turn, Request]] = []

    def add(self, request: Request) -> None:
        """Puts a request behind those with a smaller turn."""
        assert request not in self._entries, f"{request} waits already"
        entry = self._entries[request] = (request.turn, request)
        heapq.heappush(self._heap, entry)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        del self._entries[request]
        num_dead = len(self._heap) - len(self._entries)
        if num_dead > max(MIN_DEAD_ENTRIES, len(self._entries)):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def peek(self) -> Request | None:
        """Whose turn it is; None if nobody waits."""
        heap, entries = self._heap, self._entries
        while heap:
            request = heap[0][1]
            if entries.get(request) is heap[0]:
                return request
            heapq.heappop(heap)
        return None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """All in order, at the cost of sorting them: for checks, not for steps."""
        return iter(sorted(self._entries, key=lambda request: request.turn))
