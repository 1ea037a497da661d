"""The places for adapters: how many different ones running requests may use at once.

Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from trio_engine.core.request import Request


class AdapterPlaces:
    """Counts the running requests of each adapter; those without one need no place.

    Args:
        max_loras: places.
    """

    __slots__ = ("_max_loras", "_num_requests")

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._num_requests: Counter[int] = Counter()  # by adapter, each 1 or more

    @property
    def lora_ids(self) -> Set[int]:
        """Adapters that have a place."""
        return self._num_requests.keys()

    def has_place(self, request: Request) -> bool:
        """Whether a request could run now, as far as its adapter is concerned."""
        lora_id = request.lora_id
        is_there = not lora_id or lora_id in self._num_requests
        return is_there or len(self._num_requests) < self._max_loras

    def take(self, request: Request) -> None:
        """A request runs."""
        if request.lora_id:
            self._num_requests[request.lora_id] += 1

    def free(self, request: Request) -> bool:
        """A request does not run any more; whether that leaves a place free."""
        if not request.lora_id:
            return False
        self._num_requests[request.lora_id] -= 1
        if self._num_requests[request.lora_id]:
            return False
        del self._num_requests[request.lora_id]
        return True

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises AssertionError unless the counts are those of ``running``."""
        counts = Counter(request.lora_id for request in running if request.lora_id)
        assert counts == self._num_requests, "places for adapters are lost or doubled"
