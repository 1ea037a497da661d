"""A step that was planned: its plan for the executor, and what the core must remember of it.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from trio_engine.core.plan import NewRow, StepPlan
from trio_engine.core.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class ComputedTokens(NamedTuple):
    """What is computed of a request once the step has settled.

    Attributes:
        request: whose.
        num_preemptions: that it had had when this was planned; if it has had more since, its
            blocks are others'.
        num_tokens: how many of its tokens, from the first.
        samples: whether the step draws its next token.
    """

    request: Request
    num_preemptions: int
    num_tokens: int
    samples: bool


class ScheduledStep(msgspec.Struct, kw_only=True, eq=False):
    """A plan and what the core must remember of it; lists are aligned with the plan's slots.

    Attributes:
        plan: for the executor.
        requests: whose row is in each place.
        starts: planned tokens of each request before this plan, to go back to if it fails.
        samples: whether the row samples a token in this plan.
        computed: of rows that compute a chunk, or the first token of a block: the others have
            come to the end of none before this step. See ``Scheduler.settle``.
        resumed: requests that got a slot in this plan, first start or not.
        preempted: requests that lost theirs.
    """

    plan: StepPlan
    requests: list[Request] = msgspec.field(default_factory=list)
    starts: list[int] = msgspec.field(default_factory=list)
    samples: list[bool] = msgspec.field(default_factory=list)
    computed: list[ComputedTokens] = msgspec.field(default_factory=list)
    resumed: list[Request] = msgspec.field(default_factory=list)
    preempted: list[Request] = msgspec.field(default_factory=list)

    def grammar_failures(self, ends: Mapping[int, str | None]) -> Iterator[tuple[Request, str]]:
        """Live requests whose grammar failed, and why, of all that ended in this step, by slot."""
        for slot, request in zip(self.plan.slots, self.requests, strict=True):
            why = ends.get(slot)
            if why is not None and not request.is_finished:
                yield request, why


class StepDraft:
    """A step while it is put together.

    Most rows of most steps compute one token and sample: of these only ``requests`` and
    ``starts`` are noted.
    """

    __slots__ = ("_unusual", "budget", "requests", "starts", "step")

    def __init__(self, step: ScheduledStep, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.requests = step.requests
        self.starts = step.starts
        # Place, tokens, whether it samples.
        self._unusual: list[tuple[int, int, bool]] = []

    def append(self, request: Request, num_tokens: int, *, samples: bool) -> None:
        """Adds a row of any kind."""
        start = request.num_planned_tokens
        if num_tokens != 1 or not samples:
            self._unusual.append((len(self.requests), num_tokens, samples))
        self.step.computed.append(
            ComputedTokens(request, request.num_preemptions, start + num_tokens, samples)
        )
        self.requests.append(request)
        self.starts.append(start)
        self.budget -= num_tokens

    def finish(self) -> tuple[list[int], list[int]]:
        """Slots and numbers of tokens of all rows; also sets the step's ``samples``."""
        num_rows = len(self.requests)
        counts, samples = [1] * num_rows, [True] * num_rows
        for index, num_tokens, row_samples in self._unusual:
            counts[index], samples[index] = num_tokens, row_samples
        self.step.samples = samples
        return [request.slot for request in self.requests], counts


def make_row(request: Request) -> NewRow:
    """A request as the executor gets to know it."""
    # Copies: the executor reads them on its own thread while the core goes on.
    return NewRow(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=request.token_ids.tolist(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_planned_tokens,
        block_ids=request.block_ids.copy(),
        sampling_params=request.sampling_params,
        prompt_embeds=request.prompt_embeds,
        prompt_is_token_ids=request.prompt_is_token_ids,
        lora_request=request.lora_request,
        grammar=request.grammar,
    )
