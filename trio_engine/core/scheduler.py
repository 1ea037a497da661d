"""Which requests run in the next step, with how many tokens, in which blocks.

Pure. Continuous batching, first come first served; long prompts are cut into chunks; when blocks
run out, the youngest running request is preempted and computed again later. Nothing here knows
tokens' values or clients: ``EngineCore`` does.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from trio_engine.core.lifecycle import RequestEvent, RequestStatus
from trio_engine.core.plan import NewRow, StepPlan
from trio_engine.core.request import NO_SLOT, Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_engine.core.kv_cache import KVCacheManager


class ScheduledStep(msgspec.Struct, kw_only=True, eq=False):
    """A plan and what the core must remember of it; lists are aligned with the plan's slots.

    Attributes:
        plan: for the executor.
        requests: whose row is in each place.
        starts: planned tokens of each request before this plan, to go back to if it fails.
        samples: whether the row samples a token in this plan.
        resumed: requests that got a slot in this plan, first start or not.
        preempted: requests that lost theirs.
    """

    plan: StepPlan
    requests: list[Request] = msgspec.field(default_factory=list)
    starts: list[int] = msgspec.field(default_factory=list)
    samples: list[bool] = msgspec.field(default_factory=list)
    resumed: list[Request] = msgspec.field(default_factory=list)
    preempted: list[Request] = msgspec.field(default_factory=list)


class Scheduler:
    """Owns the waiting queue, the running list, the slots and the KV blocks.

    Args:
        kv_cache: the blocks; must hold one request of max_model_len tokens, or a lone request
            could wait for ever.
        max_num_seqs: slots.
        max_num_batched_tokens: tokens of one step.
    """

    def __init__(
        self, kv_cache: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.kv_cache = kv_cache
        self.max_num_batched_tokens = max_num_batched_tokens
        # Ordered by turn; ordered dict, so that an abort in the middle of thousands is O(1).
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        # Ordered by admission: the last is the first to be preempted.
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        # Slots whose rows the executor still holds for nobody; told by the next plan.
        self._finished_slots: list[int] = []
        self._needs_reset = False

    @property
    def num_free_slots(self) -> int:
        """How many more requests could run at once."""
        return len(self._free_slots)

    @property
    def has_started_requests(self) -> bool:
        """Whether any request here has started, preempted ones included."""
        if self.running:
            return True
        first = next(iter(self.waiting), None)
        return first is not None and first.status is RequestStatus.PREEMPTED

    def add(self, request: Request) -> None:
        """Puts a new request at the end of the queue."""
        self.waiting[request] = None

    def remove(self, request: Request) -> None:
        """Forgets a request that ends, wherever it is; its slot and blocks are free at once."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            del self.waiting[request]

    def schedule(self, plan_id: int, *, admit: bool) -> ScheduledStep:
        """Plans the next step.

        Args:
            plan_id: for the plan.
            admit: whether new requests may start; preempted ones may in any case.

        Returns:
            The step; without rows if nothing can run now, though it may have preempted.
        """
        step = ScheduledStep(plan=StepPlan(plan_id=plan_id, slots=[], num_scheduled_tokens=[]))
        budget = self._schedule_running(step, self.max_num_batched_tokens)
        if not step.preempted:
            self._schedule_waiting(step, budget, admit=admit)
        if not step.requests:
            return step  # changes to rows wait for a plan that is launched
        step.plan.reset, self._needs_reset = self._needs_reset, False
        step.plan.finished_slots, self._finished_slots = self._finished_slots, []
        return step

    def preempt_all(self) -> list[Request]:
        """Takes slots and blocks of all running requests, oldest first in the queue again.

        Only while no plan is in flight. Tokens are kept.
        """
        preempted = list(self.running)
        while self.running:
            self._preempt(self.running[-1])
        return preempted

    def roll_back(self, steps: Iterable[ScheduledStep]) -> None:
        """Undoes steps that did not run or do not count, in any order (rule 6).

        Requests go back to their last settled token; the executor gets all rows anew, as plans
        that carried changes were dropped. The caller forgets the steps, so no late result of
        theirs finds a row.
        """
        for step in steps:
            rows = zip(step.requests, step.starts, step.samples, strict=True)
            for request, start, samples in rows:
                if request.is_finished:
                    continue
                request.num_unsettled_tokens -= samples
                # Less than the start if it was preempted since: then nothing is computed.
                request.num_planned_tokens = min(request.num_planned_tokens, start)
        for request in self.running:
            request.is_resident = False
        self._finished_slots.clear()
        self._needs_reset = True

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, slots and blocks agree."""
        assert not set(self.running) & set(self.waiting), "a request is in two queues"
        slots = [request.slot for request in self.running]
        all_slots = sorted(slots + self._free_slots)
        assert all_slots == list(range(len(all_slots))), "a slot is lost or doubled"
        for request in self.running:
            assert request.status is RequestStatus.RUNNING, f"{request} in running"
        for request in self.waiting:
            is_queued = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert is_queued, f"{request} in waiting"
            assert not request.block_ids, f"{request} waits with blocks"
            assert request.slot == NO_SLOT, f"{request} waits with a slot"
        self.kv_cache.check_integrity(self.running)

    def _schedule_running(self, step: ScheduledStep, budget: int) -> int:
        index = 0
        while budget > 0 and index < len(self.running):
            request = self.running[index]
            num_tokens = min(request.num_tokens_to_plan, budget)
            if num_tokens > 0:
                new_block_ids = self._grow(request, num_tokens, step)
                if new_block_ids is None:
                    break
                self._append_row(step, request, num_tokens, new_block_ids)
                budget -= num_tokens
            index += 1
        return budget

    def _grow(self, request: Request, num_tokens: int, step: ScheduledStep) -> list[int] | None:
        """Room for more tokens, at the cost of the youngest; None if that is the request."""
        target = request.num_planned_tokens + num_tokens
        while (new_block_ids := self.kv_cache.grow(request, target)) is None:
            # Never one that this step has already: those stand before ``request``.
            victim = self.running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return None
        return new_block_ids

    def _schedule_waiting(self, step: ScheduledStep, budget: int, *, admit: bool) -> None:
        while budget > 0 and self.waiting and self._free_slots:
            request = next(iter(self.waiting))
            if not admit and request.status is RequestStatus.WAITING:
                break
            # Its replay would lack the token that is still in flight (rule 5). Nobody overtakes.
            if request.num_unsettled_tokens:
                break
            # Blocks for all its tokens at once, also if it then starts with a chunk of them: two
            # half-computed prompts must not take each other's room.
            if self.kv_cache.grow(request, len(request.token_ids)) is None:
                break
            del self.waiting[request]
            request.advance(RequestEvent.SCHEDULE)
            request.slot = self._free_slots.pop()
            self.running.append(request)
            step.resumed.append(request)
            num_tokens = min(request.num_tokens_to_plan, budget)
            self._append_row(step, request, num_tokens, [])
            budget -= num_tokens

    def _append_row(
        self, step: ScheduledStep, request: Request, num_tokens: int, new_block_ids: list[int]
    ) -> None:
        plan = step.plan
        if not request.is_resident:
            plan.new_rows.append(_make_row(request))
            request.is_resident = True
        elif new_block_ids:
            plan.new_block_ids.append((request.slot, new_block_ids))
        start = request.num_planned_tokens
        samples = start + num_tokens == len(request.token_ids) + request.num_unsettled_tokens
        request.num_planned_tokens = start + num_tokens
        request.num_unsettled_tokens += samples
        plan.slots.append(request.slot)  # type: ignore[attr-defined]  # lists until handed over
        plan.num_scheduled_tokens.append(num_tokens)  # type: ignore[attr-defined]
        step.requests.append(request)
        step.starts.append(start)
        step.samples.append(samples)

    def _preempt(self, request: Request) -> None:
        request.advance(RequestEvent.PREEMPT)
        self.running.remove(request)
        self._release(request)
        request.num_planned_tokens = 0
        request.num_preemptions += 1
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)

    def _release(self, request: Request) -> None:
        self.kv_cache.free(request)
        self._free_slots.append(request.slot)
        if request.is_resident:
            self._finished_slots.append(request.slot)
        request.is_resident = False
        request.slot = NO_SLOT


def _make_row(request: Request) -> NewRow:
    # Copies: the executor reads them on its own thread while the core goes on.
    return NewRow(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=request.token_ids.copy(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_planned_tokens,
        block_ids=request.block_ids.copy(),
        sampling_params=request.sampling_params,
    )
