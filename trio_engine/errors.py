"""Every error that trio_engine raises, named by whose fault it is.

Pure. Foreign errors (zmq, msgspec, torch) are translated into these at one seam each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BRIEF_LENGTH = 300
"""Characters. An id or a field of a peer's may have megabytes; a line about it stays readable."""


def brief(text: str, limit: int = BRIEF_LENGTH) -> str:
    """A peer's text as a message or a log line shows it: a long one without its middle."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end]} [...] {text[-end:]}"


class EngineError(Exception):
    """Root of all errors of this package."""


class ConfigError(EngineError, ValueError):
    """The caller's configuration cannot work; the message names the option and its value."""


class RequestError(EngineError, ValueError):
    """The caller's request can never be served; the message names the field and its value."""


class RequestFailedError(EngineError):
    """The engine ended the request with ERROR; whose fault it was does not cross the wire.

    Attributes:
        request_id: the caller's.
        reason: what the engine said about it, if anything.
    """

    def __init__(self, message: str, *, request_id: str, reason: int | str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.reason = reason


class UtilityError(EngineError):
    """The engine refused a utility call, or could not do it; the message is the engine's."""


class OverloadedError(EngineError):
    """The engine or client holds as many requests as it was told to; try again later."""


class ProtocolError(EngineError):
    """The peer's bytes break the wire protocol; nothing of the message was applied."""


class EngineClosedError(EngineError):
    """You closed this engine or client, then used it."""


class EngineStartError(EngineError):
    """The engine process did not become ready.

    Attributes:
        exit_status: of the process if it ended by itself, negative for a signal, else None.
        stderr_tail: the last lines that it wrote to standard error.
    """

    def __init__(
        self, message: str, *, exit_status: int | None = None, stderr_tail: str = ""
    ) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail


class EngineDeadError(EngineError):
    """The engine ended while it was in use; no request of it will be answered any more.

    Attributes:
        exit_status: of the process if known, negative for a signal, else None.
        stderr_tail: the last lines that it wrote to standard error.
    """

    def __init__(
        self, message: str, *, exit_status: int | None = None, stderr_tail: str = ""
    ) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether somebody else asked it to, as by SIGTERM, and it ended in good order.

        False too if that is not known: of an engine elsewhere nobody sees the exit status.
        """
        return self.exit_status == 0


class ModelError(EngineError):
    """A model cannot be loaded: missing, damaged, or of an unsupported kind. Names the file."""


class StepError(EngineError):
    """A forward pass failed in a way that ends the engine."""


class RequestStepError(EngineError):
    """A forward pass failed because of some of its requests only.

    An executor raises it from ``launch`` or ``collect``; the engine ends these requests with
    ERROR and plans the others again.

    Attributes:
        slots: the rows at fault, by their slot in the plan.
    """

    def __init__(self, message: str, *, slots: Sequence[int]) -> None:
        super().__init__(message)
        self.slots = tuple(slots)
