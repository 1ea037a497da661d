"""Requests whose grammar is not compiled yet: they are admitted, and hold nobody up.

Pure. What compiles is a service beside the core (``engine/grammar_service.py``): it takes what
came and what ended from here, and hands in what became of it to ``EngineCore``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_engine.core.request import Request


class PendingGrammars:
    """The requests, in the order in which they came, and the news of them."""

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}
        self._new: list[Request] = []
        self._ended: list[Request] = []

    def add(self, request: Request) -> None:
        """A request came."""
        self._requests[request] = None
        self._new.append(request)

    def remove(self, request: Request) -> None:
        """Its grammar is compiled or failed."""
        del self._requests[request]

    def end(self, request: Request) -> None:
        """It ended before that: nobody needs the grammar."""
        del self._requests[request]
        self._ended.append(request)

    @property
    def has_news(self) -> bool:
        """Whether ``take_news`` has any."""
        return bool(self._new or self._ended)

    def take_news(self) -> tuple[list[Request], list[Request]]:
        """Those that came and those that ended since the last call, in no one's hands yet."""
        new, self._new = self._new, []
        ended, self._ended = self._ended, []
        return new, ended

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


def describe_failure(request: Request, why: str) -> str:
    """The reason for the client, by the option that asked for the grammar."""
    params = request.sampling_params.structured_outputs
    return f"structured_outputs.{'' if params is None else params.kind}: {why}"
