"""Gives the tokens of a step that has run to their requests, and to the outboxes of their clients.

Pure. Nothing else in the core takes as long when many rows decode: rows of the decode batch that
have nothing to tell but a token are treated all at once, the others one by one.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NoReturn, Protocol

from trio_engine.core.lifecycle import RequestStatus
from trio_engine.core.logprobs import put_details
from trio_engine.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from trio_engine.core.decode_batch import DecodeRows
    from trio_engine.core.outbox import Outbox
    from trio_engine.core.plan import StepResult
    from trio_engine.core.request import Request
    from trio_engine.core.scheduled_step import ScheduledStep

_FINISHED = RequestStatus.FINISHED


class EndIfDue(Protocol):
    """Applies the stop rules to a request that has just got a token which may be its last."""

    def __call__(self, request: Request, token_id: int, *, grammar_ended: bool = False) -> None:
        """Ends the request or does nothing."""
        ...


class TokenDelivery:
    """Tokens from results to requests and outboxes.

    Args:
        outboxes: by client.
        vocab_size: what is no id below it was drawn by a broken executor.
        end_if_due: called for each token that may end its request, and for no other.
    """

    def __init__(
        self, outboxes: Sequence[Outbox], *, vocab_size: int, end_if_due: EndIfDue
    ) -> None:
        self._outboxes = outboxes
        self._vocab_size = vocab_size
        self._end_if_due = end_if_due

    def deliver(self, step: ScheduledStep, result: StepResult, num_departures: int) -> set[int]:
        """Gives every live row that sampled its token.

        Args:
            step: settled by the scheduler.
            result: of its plan.
            num_departures: of the decode batch by now.

        Returns:
            The clients that are told something.

        Raises:
            StepError: a token is none.
        """
        plain = [] if result.num_nans_in_logits else step.decodes.plain
        num_plain, departed = len(plain), []
        told, token_ids = set(step.decodes.client_indices), result.token_ids[:num_plain]
        if plain and num_departures != step.decodes.num_departures:
            departed = [i for i, request in enumerate(plain) if request.decode_offset is None]
            here = [i for i, request in enumerate(plain) if request.decode_offset is not None]
            plain, token_ids = [plain[i] for i in here], [token_ids[i] for i in here]
            told = {request.client_index for request in plain}
        if plain:
            self._deliver_plain(plain, token_ids, told, step.decodes, result)
        else:
            told = set()
        for index in chain(departed, range(num_plain, len(step.requests))):
            request = step.requests[index]
            # A request that has ended since gets nothing; under its id another may live (rule 2).
            if step.samples[index] and request.status is not _FINISHED:
                told.add(request.client_index)
                self._deliver_row(request, step.plan.slots[index], result.token_ids[index], result)
        return told

    def _deliver_plain(
        self,
        requests: Sequence[Request],
        token_ids: list[int],
        client_indices: Collection[int],
        decodes: DecodeRows,
        result: StepResult,
    ) -> None:
        """To plain rows of the decode batch, of which none ends by its length: see there."""
        self._check_tokens(requests, token_ids, result)
        for request, token_id in zip(requests, token_ids, strict=True):
            request.token_ids.append(token_id)
        self._put_tokens(client_indices, requests, token_ids)
        if not decodes.watched_token_ids.isdisjoint(token_ids):
            self._end_watched(requests, token_ids)

    def _put_tokens(
        self, client_indices: Collection[int], requests: Sequence[Request], token_ids: Sequence[int]
    ) -> None:
        if len(client_indices) == 1:
            (client_index,) = client_indices
            self._outboxes[client_index].append_tokens(requests, token_ids)
            return
        for request, token_id in zip(requests, token_ids, strict=True):
            self._outboxes[request.client_index].append_token(request, token_id)

    def _end_watched(self, requests: Iterable[Request], token_ids: Iterable[int]) -> None:
        for request, token_id in zip(requests, token_ids, strict=True):
            if token_id in request.watched_token_ids:
                self._end_if_due(request, token_id)

    def _deliver_row(self, request: Request, slot: int, token_id: int, result: StepResult) -> None:
        if not 0 <= token_id < self._vocab_size:
            self._refuse_token(request, token_id, result)
        outbox = self._outboxes[request.client_index]
        if request.asks_logprobs or result.num_nans_in_logits:
            put_details(outbox, request, slot, result, self._vocab_size)
        if request.decode_offset is None:  # else it is counted by the decode batch
            request.num_unsettled_tokens -= 1
        request.token_ids.append(token_id)
        outbox.append_token(request, token_id)
        grammar_ended = result.grammar_ends is not None and slot in result.grammar_ends
        if (
            token_id in request.watched_token_ids
            or len(request.token_ids) >= request.watched_length
            or grammar_ended
        ):
            self._end_if_due(request, token_id, grammar_ended=grammar_ended)

    def _check_tokens(
        self, requests: Sequence[Request], token_ids: list[int], result: StepResult
    ) -> None:
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self._vocab_size:
            worst = lowest if lowest < 0 else highest
            self._refuse_token(requests[token_ids.index(worst)], worst, result)

    def _refuse_token(self, request: Request, token_id: int, result: StepResult) -> NoReturn:
        raise StepError(f"plan {result.plan_id} gave token {token_id} for {request!r}")
