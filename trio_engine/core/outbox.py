"""What a client has not been sent yet, merged so that a slow client costs bounded memory.

Pure. The step loop fills it, the client's writer empties it whole. Entries are kept by a request's
life and not by id: a request under a re-used id must not inherit older tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trio_engine.core.logprobs import UnsentLogprobs
from trio_engine.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    PrefixCacheStats,
    SchedulerStats,
    UtilityOutput,
)
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.core.request import Request
    from trio_engine.outputs import LogprobsLists, LogprobsTensors

# A pooling request's end must carry a tensor, or a vLLM front end stops.
EMPTY_POOLING_OUTPUT = TensorData("float32", (0,), b"")
# Sizes in memory, for the limit only: an entry or an answer without its texts, a token (an int and
# its place in a list), a finished id without its text. Measured with CPython 3.11.
ENTRY_BYTES = 500
TOKEN_BYTES = 40
FINISHED_ID_BYTES = 100


class Outbox:
    """Unsent outputs of one engine for one client.

    Args:
        client_index: of the client.
        engine_index: told in every message.
        limit_bytes: size beyond which ``is_full``.
    """

    __slots__ = (
        "_entries",
        "_finished_requests",
        "_is_dead",
        "_limit_bytes",
        "_logprobs",
        "_scheduler_stats",
        "_utility_outputs",
        "client_index",
        "engine_index",
        "num_bytes",
    )

    def __init__(
        self, client_index: int, engine_index: int, *, limit_bytes: float = math.inf
    ) -> None:
        self.client_index = client_index
        self._limit_bytes = limit_bytes
        self.engine_index = engine_index
        self.num_bytes = 0
        # By ``Request.life``.
        self._entries: dict[object, EngineCoreOutput] = {}
        # Of those entries that have any; of their arrays none is touched before they are taken.
        self._logprobs: dict[object, UnsentLogprobs] = {}
        self._finished_requests: set[str] = set()
        self._scheduler_stats: SchedulerStats | None = None
        self._utility_outputs: list[UtilityOutput] = []
        self._is_dead = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (
            self._entries
            or self._finished_requests
            or self._scheduler_stats is not None
            or self._utility_outputs
            or self._is_dead
        )

    @property
    def is_full(self) -> bool:
        """Whether its client must read before it may ask for more."""
        return self.num_bytes > self._limit_bytes

    @property
    def is_dead(self) -> bool:
        """Whether the engine's death is to be told after everything else."""
        return self._is_dead

    def append_token(self, request: Request, token_id: int) -> None:
        """Adds a token, and what else there is to tell of its request."""
        # As ``_entry_of``, for every token of every request; most have nothing else to tell.
        entry = self._entries.get(request.life)
        if entry is not None and not request.events:
            entry.new_token_ids.append(token_id)
            self.num_bytes += TOKEN_BYTES
        elif request.prefill_stats is None and request.trace_headers is None and not request.events:
            self._entries[request.life] = EngineCoreOutput(request.request_id, [token_id])
            self.num_bytes += ENTRY_BYTES + TOKEN_BYTES + request.unsent_text_bytes
        else:
            self._entry_of(request).new_token_ids.append(token_id)
            self.num_bytes += TOKEN_BYTES

    def append_tokens(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Adds a token of each of some requests of which there is nothing else to tell."""
        if self._entries:
            for request, token_id in zip(requests, token_ids, strict=True):
                self.append_token(request, token_id)
            return
        self._entries = {
            request.life: EngineCoreOutput(request.request_id, [token_id])
            for request, token_id in zip(requests, token_ids, strict=True)
        }
        num_text_bytes = sum([request.unsent_text_bytes for request in requests])
        self.num_bytes += (ENTRY_BYTES + TOKEN_BYTES) * len(requests) + num_text_bytes

    def append_logprobs(self, request: Request, rows: LogprobsLists) -> None:
        """Adds the row of the token that is appended next."""
        unsent = self._logprobs_of(request)
        self.num_bytes -= unsent.num_bytes
        unsent.append(rows)
        self.num_bytes += unsent.num_bytes

    def put_prompt_logprobs(self, request: Request, tensors: LogprobsTensors) -> None:
        """Adds those of a request's prompt; the first ones stay."""
        unsent = self._logprobs_of(request)
        self.num_bytes -= unsent.num_bytes
        unsent.put_prompt(tensors)
        self.num_bytes += unsent.num_bytes

    def put_num_nans(self, request: Request, num_nans: int) -> None:
        """Adds to the count of NaNs that the logits of a request's unsent tokens had."""
        self._entry_of(request).num_nans_in_logits += num_nans

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Adds the terminal event of a request that the engine ends."""
        entry = self._entry_of(request)
        entry.finish_reason = reason
        entry.stop_reason = stop_reason
        self._note_finished(request.request_id)
        self.num_bytes += _text_bytes(stop_reason)

    def refuse(
        self,
        request_id: str,
        reason: FinishReason,
        stop_reason: str | None = None,
        *,
        is_pooling: bool = False,
    ) -> None:
        """Adds the terminal event of a request that never got in."""
        entry = self._entries[object()] = EngineCoreOutput(
            request_id,
            [],
            finish_reason=reason,
            stop_reason=stop_reason,
            pooling_output=EMPTY_POOLING_OUTPUT if is_pooling else None,
        )
        self._note_finished(request_id)
        self.num_bytes += ENTRY_BYTES + len(entry.request_id) + _text_bytes(stop_reason)

    def drop(self, request: Request) -> None:
        """Takes back what is unsent of a request that its client aborted; only its end is told."""
        entry = self._entries.pop(request.life, None)
        if entry is not None:
            self.num_bytes -= ENTRY_BYTES + request.unsent_text_bytes
            self.num_bytes -= TOKEN_BYTES * len(entry.new_token_ids)
        unsent = self._logprobs.pop(request.life, None)
        if unsent is not None:
            self.num_bytes -= unsent.num_bytes
        self._note_finished(request.request_id)

    def put_scheduler_stats(self, stats: SchedulerStats) -> None:
        """Replaces the gauges; prefix cache numbers add up, as they are deltas."""
        if self._scheduler_stats is not None:
            _add_up(stats.prefix_cache_stats, self._scheduler_stats.prefix_cache_stats)
        self._scheduler_stats = stats

    def put_utility_output(self, output: UtilityOutput, *, result_bytes: int = 0) -> None:
        """Adds an answer; it is sent after all outputs that came before it.

        ``result_bytes`` is what the result takes, encoded.
        """
        self._utility_outputs.append(output)
        self.num_bytes += ENTRY_BYTES + len(output.failure_message or "") + result_bytes

    def mark_dead(self) -> None:
        """Tells the engine's death as the last word."""
        self._is_dead = True

    def take(self, timestamp: float) -> list[EngineCoreOutputs]:
        """Empties the outbox, but for the death notice, which the writer sends last.

        Returns:
            Messages in the order to send: all outputs in one, then each utility answer alone
            (a receiver reads nothing else of a message that has one).
        """
        for life, unsent in self._logprobs.items():
            entry = self._entries[life]
            entry.new_logprobs = unsent.joined()
            entry.new_prompt_logprobs_tensors = unsent.prompt
        messages: list[EngineCoreOutputs] = []
        if self._entries or self._finished_requests or self._scheduler_stats is not None:
            messages.append(
                EngineCoreOutputs(
                    engine_index=self.engine_index,
                    outputs=list(self._entries.values()),
                    scheduler_stats=self._scheduler_stats,
                    timestamp=timestamp,
                    finished_requests=self._finished_requests or None,
                )
            )
        messages.extend(
            EngineCoreOutputs(
                engine_index=self.engine_index, timestamp=timestamp, utility_output=answer
            )
            for answer in self._utility_outputs
        )
        self._entries = {}
        self._logprobs = {}
        self._finished_requests = set()
        self._scheduler_stats = None
        self._utility_outputs = []
        self.num_bytes = 0
        return messages

    def _note_finished(self, request_id: str) -> None:
        if request_id not in self._finished_requests:
            self._finished_requests.add(request_id)
            self.num_bytes += FINISHED_ID_BYTES + len(request_id)

    def _logprobs_of(self, request: Request) -> UnsentLogprobs:
        unsent = self._logprobs.get(request.life)
        if unsent is None:
            unsent = self._logprobs[request.life] = UnsentLogprobs()
        return unsent

    def _entry_of(self, request: Request) -> EngineCoreOutput:
        """The unsent entry, opened if there is none, with all events up to now."""
        entry = self._entries.get(request.life)
        if entry is None:
            entry = self._entries[request.life] = EngineCoreOutput(request.request_id, [])
            if request.trace_headers is not None:
                entry.trace_headers = request.trace_headers
            if request.prefill_stats is not None:
                entry.prefill_stats, request.prefill_stats = request.prefill_stats, None
            self.num_bytes += ENTRY_BYTES + request.unsent_text_bytes
        if request.events:
            entry.events = (entry.events or []) + request.events
            request.events = []
        return entry


def _text_bytes(text: object) -> int:
    return len(text) if isinstance(text, str) else 0


def _add_up(total: PrefixCacheStats, earlier: PrefixCacheStats) -> None:
    total.reset = total.reset or earlier.reset
    for name in total.__struct_fields__:
        if name != "reset":
            setattr(total, name, getattr(total, name) + getattr(earlier, name))
