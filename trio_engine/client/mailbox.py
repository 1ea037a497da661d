"""What has arrived of one answer and has not been read yet.

Pure. The receiver puts, the stream's reader takes; neither waits for the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.client.outputs import RequestOutput
from trio_engine.outputs import LogprobsLists
from trio_engine.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.outputs import EngineCoreOutput, FinishReason, LogprobsTensors


class Mailbox:
    """Merges the outputs of one request until its reader takes them.

    A slow reader costs its own tokens' memory and nothing else: entries merge by appending, as
    in the engine's outbox, and the next item holds all that came meanwhile. The first end counts;
    whatever comes after it is dropped.

    Args:
        request_id: the caller's, for the outputs.
        num_prompt_tokens: likewise.
        output_kind: when there is something to take, and how much of it.
        num_logprobs: entries beside the sampled token to keep of each logprobs row; None keeps
            the engine's width, which is the widest of the batch.
        index: which of the request's answers this is.

    Attributes:
        on_ready: called whenever there may be something to take; its reader's.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        output_kind: RequestOutputKind,
        num_logprobs: int | None = None,
        *,
        index: int = 0,
    ) -> None:
        self.on_ready: Callable[[], object] = _nobody
        self._index = index
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._output_kind = output_kind
        self._width = None if num_logprobs is None else num_logprobs + 1

        # Not taken yet; of kinds other than DELTA, everything so far.
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobsLists] = []
        self._prompt_logprobs: LogprobsTensors | None = None
        self._has_news = False

        self._num_output_tokens = 0
        self._num_cached_tokens: int | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._failure: Exception | None = None
        self._end_was_taken = False

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come (there may be something left to take)."""
        return self._finish_reason is not None or self._failure is not None

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take."""
        return (self.is_ended or self._has_partial) and not self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """Whether the last item has been taken."""
        return self._end_was_taken

    def put(self, entry: EngineCoreOutput, text: str, num_tokens: int) -> None:
        """Appends an entry, but for its finish reason.

        Args:
            entry: as it came.
            text: what its tokens came to.
            num_tokens: how many of them belong to the output; the others stand behind a stop
                string.
        """
        if self.is_ended:
            return
        self._token_ids += entry.new_token_ids[:num_tokens]
        self._num_output_tokens += num_tokens
        if text:
            self._texts.append(text)
        if entry.new_logprobs is not None:
            self._logprobs.append(_cut(entry.new_logprobs, num_tokens, self._width))
        if entry.new_prompt_logprobs_tensors is not None:
            self._prompt_logprobs = entry.new_prompt_logprobs_tensors
        if entry.prefill_stats is not None:
            self._num_cached_tokens = entry.prefill_stats.num_cached_tokens
        # Not for an entry that only brings an end, or its reader would get an empty item first.
        if num_tokens or text or entry.new_prompt_logprobs_tensors is not None:
            self._has_news = True
            self._tell_if_ready()

    def finish(self, finish_reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends the request; the reader's next item is its last."""
        if self.is_ended:
            return
        self._finish_reason = finish_reason
        self._stop_reason = stop_reason
        self._tell_if_ready()

    def fail(self, error: Exception) -> None:
        """Ends the request by an error, raised once what came before it has been taken."""
        if self.is_ended:
            return
        self._failure = error
        self._tell_if_ready()

    def take(self) -> RequestOutput:
        """The next item; there must be one (``is_ready``).

        Raises:
            Exception: what ``fail`` was given.
        """
        if self._failure is not None and not self._has_partial:
            self._end_was_taken = True
            raise self._failure
        # Joined pieces stay as one, so that a CUMULATIVE reader does not join them all again.
        self._texts = ["".join(self._texts)]
        self._logprobs = _join(self._logprobs)
        output = RequestOutput(
            request_id=self._request_id,
            index=self._index,
            text=self._texts[0],
            token_ids=self._token_ids.copy(),
            logprobs=self._logprobs[0] if self._logprobs else None,
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )
        self._has_news = False
        self._end_was_taken = output.finished
        if self._output_kind is RequestOutputKind.DELTA:
            self._forget_taken()
        return output

    @property
    def _has_partial(self) -> bool:
        return self._has_news and self._output_kind is not RequestOutputKind.FINAL_ONLY

    def _tell_if_ready(self) -> None:
        if self.is_ready:
            self.on_ready()

    def _forget_taken(self) -> None:
        self._texts.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        self._prompt_logprobs = None


def _nobody() -> None:
    """No reader yet."""


def _cut(rows: LogprobsLists, num_rows: int | None, width: int | None) -> LogprobsLists:
    return LogprobsLists(
        rows.logprob_token_ids[:num_rows, :width],
        rows.logprobs[:num_rows, :width],
        rows.sampled_token_ranks[:num_rows],
    )


def _join(pieces: list[LogprobsLists]) -> list[LogprobsLists]:
    """At most one piece, of all rows; where widths differ (none was asked for), the smallest."""
    if len(pieces) <= 1:
        return pieces
    width = min(piece.logprobs.shape[1] for piece in pieces)
    cut = [_cut(piece, None, width) for piece in pieces]
    return [
        LogprobsLists(
            np.concatenate([piece.logprob_token_ids for piece in cut]),
            np.concatenate([piece.logprobs for piece in cut]),
            np.concatenate([piece.sampled_token_ranks for piece in cut]),
        )
    ]
