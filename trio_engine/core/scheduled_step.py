"""A step that was planned: its plan for the executor, and what the core must remember of it.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from trio_engine.core.decode_batch import DecodeRows
from trio_engine.core.plan import NewRow, StepPlan
from trio_engine.core.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


ComputedTokens: TypeAlias = tuple[Request, int, int, bool]
"""What is computed of a request once the step has settled: whose, preemptions that it had had when
this was planned (if it has had more since, its blocks are others'), how many of its tokens from the
first, and whether the step draws its next one. A plain tuple, as many are made."""


class ScheduledStep(msgspec.Struct, kw_only=True, eq=False):
    """A plan and what the core must remember of it; lists are aligned with the plan's slots.

    Attributes:
        plan: for the executor.
        decodes: the decode batch, whose rows come first; each has one token, which it samples.
        requests: whose row is in each place.
        samples: whether the row samples a token in this plan.
        starts: of the rows behind the decode batch: planned tokens of each request before this
            plan, to go back to if it fails.
        computed: of rows that compute a chunk, or the first token of a block: the others have
            come to the end of none before this step. See ``Scheduler.settle``.
        resumed: requests that got a slot in this plan, first start or not.
        preempted: requests that lost theirs.
    """

    plan: StepPlan
    decodes: DecodeRows
    requests: list[Request]
    samples: list[bool]
    starts: Sequence[int] = ()
    computed: Sequence[ComputedTokens] = ()
    resumed: Sequence[Request] = ()
    preempted: Sequence[Request] = ()

    @classmethod
    def of_decodes(cls, plan: StepPlan, decodes: DecodeRows) -> ScheduledStep:
        """The decode batch alone, with nothing to note of any row."""
        plan.slots, plan.num_scheduled_tokens = decodes.slots, decodes.counts
        return cls(plan=plan, decodes=decodes, requests=decodes.requests, samples=decodes.samples)

    def grammar_failures(self, ends: Mapping[int, str | None]) -> Iterator[tuple[Request, str]]:
        """Live requests whose grammar failed, and why, of all that ended in this step, by slot."""
        for slot, request in zip(self.plan.slots, self.requests, strict=True):
            why = ends.get(slot)
            if why is not None and not request.is_finished:
                yield request, why


class StepDraft:
    """A step while it is put together: the rows that are not in the decode batch, and changes.

    Args:
        plan: to be filled.
        budget: tokens of the plan.

    Attributes:
        plan: as given.
        budget: tokens that are left.
        computed: as in ``ScheduledStep``.
        joining: who is in the decode batch from the next plan on, and up to which token it can be
            planned there before it must be looked at.
        resumed: as in ``ScheduledStep``.
        preempted: as in ``ScheduledStep``.
    """

    __slots__ = (
        "_counts",
        "_requests",
        "_samples",
        "_starts",
        "budget",
        "computed",
        "joining",
        "plan",
        "preempted",
        "resumed",
    )

    def __init__(self, plan: StepPlan, budget: int) -> None:
        self.plan = plan
        self.budget = budget
        self.computed: list[ComputedTokens] = []
        self.joining: list[tuple[Request, int]] = []
        self.resumed: list[Request] = []
        self.preempted: list[Request] = []
        self._requests: list[Request] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._samples: list[bool] = []

    def append(self, request: Request, num_tokens: int, *, samples: bool) -> None:
        """Adds a row."""
        start = request.num_planned_tokens
        self.computed.append((request, request.num_preemptions, start + num_tokens, samples))
        self._requests.append(request)
        self._starts.append(start)
        self._counts.append(num_tokens)
        self._samples.append(samples)
        self.budget -= num_tokens

    def finish(self, decodes: DecodeRows) -> ScheduledStep:
        """The step, the rows of the decode batch first."""
        step = ScheduledStep.of_decodes(self.plan, decodes)
        if self._requests:
            step.plan.slots = decodes.slots + [request.slot for request in self._requests]
            step.plan.num_scheduled_tokens = decodes.counts + self._counts
            step.requests = decodes.requests + self._requests
            step.samples = decodes.samples + self._samples
        step.starts, step.computed = self._starts, self.computed
        step.resumed, step.preempted = self.resumed, self.preempted
        return step


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
