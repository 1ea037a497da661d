"""The requests of one client that have not ended, whatever carries them.

Pure but for mailboxes' wake-ups. A request is in here from the moment it is sent to its terminal
event; what is not in here needs no ABORT.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trio_engine.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trio_engine.client.request import ClientRequest
    from trio_engine.outputs import EngineCoreOutput, EngineCoreOutputs

logger = logging.getLogger(__name__)


class RequestTable:
    """Open requests by internal id."""

    def __init__(self) -> None:
        self._requests: dict[str, ClientRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ClientRequest]:
        return iter(self._requests.values())

    def add(self, request: ClientRequest) -> None:
        """Enters a request that is being sent."""
        self._requests[request.internal_id] = request

    def discard(self, request: ClientRequest) -> bool:
        """Removes a request that its reader has left; False if it had ended."""
        return self._requests.pop(request.internal_id, None) is not None

    def abort(self, request_id: str) -> list[ClientRequest]:
        """Ends by ABORT all requests that their caller named so.

        A scan, not a second table to keep true: aborting by name is rare.

        Returns:
            The requests that the engine has to be told of.
        """
        named = [r for r in self._requests.values() if r.request_id == request_id]
        for request in named:
            del self._requests[request.internal_id]
            request.abort()
        return named

    def apply(self, outputs: EngineCoreOutputs) -> list[ClientRequest]:
        """Hands a message's entries to their requests; entries for others are ignored.

        Returns:
            The requests that ended here and not at the engine, which has to be told.
        """
        to_abort = []
        for entry in outputs.outputs:
            request = self._requests.get(entry.request_id)
            if request is not None and self._apply_entry(request, entry):
                to_abort.append(request)
        # Told as finished without an end of its own: somebody else aborted it. A reader must
        # not wait for what will not come.
        for internal_id in outputs.finished_requests or ():
            ended = self._requests.pop(internal_id, None)
            if ended is not None:
                ended.abort()
        return to_abort

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """Ends every request by an error of its own."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.mailbox.fail(make_error())

    def _apply_entry(self, request: ClientRequest, entry: EngineCoreOutput) -> bool:
        """True if the request ended here and the engine does not know."""
        try:
            must_abort = request.apply(entry)
        except Exception as error:
            # Tokens that the tokenizer cannot have made, say: its neighbours go on.
            logger.exception("output_not_applied request_id=%s", request.internal_id)
            failure = RequestFailedError(
                f"an output of request {request.request_id!r} could not be read: {error}",
                request_id=request.request_id,
            )
            failure.__cause__ = error
            request.mailbox.fail(failure)
            must_abort = entry.finish_reason is None
        if request.mailbox.is_ended:
            self._requests.pop(request.internal_id, None)
        return must_abort
