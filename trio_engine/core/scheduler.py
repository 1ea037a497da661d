"""Which requests run in the next step, with how many tokens, in which blocks.

Pure. Continuous batching in the order of turns: first come, first served, or by priority. Long
prompts are cut into chunks; when blocks run out, the running request whose turn is last is
preempted and computed again later. Nothing here knows tokens' values or clients: ``EngineCore``
does.
"""

from __future__ import annotations

import sys
from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING

from trio_engine.core.adapter_places import AdapterPlaces
from trio_engine.core.decode_batch import DecodeBatch
from trio_engine.core.kv_cache import KVCacheManager
from trio_engine.core.lifecycle import RequestEvent, RequestStatus
from trio_engine.core.plan import StepPlan
from trio_engine.core.request import NO_SLOT, Request
from trio_engine.core.scheduled_step import ScheduledStep, StepDraft, make_row
from trio_engine.core.waiting_requests import WaitingRequests

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from trio_engine.config import EngineConfig, SchedulingPolicy
    from trio_engine.core.plan import ExecutorProperties

_TURN = attrgetter("turn")


class Scheduler:
    """Owns the queues, the running list, the slots and the KV blocks.

    Args:
        kv_cache: the blocks; must hold one request of max_model_len tokens, or a lone request
            could wait for ever.
        max_num_seqs: slots.
        max_num_batched_tokens: tokens of one step.
        long_prefill_token_threshold: tokens of one request in one step; 0 is no such limit.
        policy: ``fcfs`` or ``priority``: what makes a turn.
        max_loras: adapters that running requests may use at once.

    Attributes:
        waiting: requests without a slot; a new one is added there.
        running: those with one, by turn: the last is the first to be preempted.

    Counterpart: ``vllm/v1/core/sched/scheduler.py``. There, under ``priority``, running requests
    get the step's tokens in the order of their admission, here by turn.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        policy: SchedulingPolicy = "fcfs",
        max_loras: int = 0,
    ) -> None:
        self.kv_cache = kv_cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_tokens_per_row = long_prefill_token_threshold or sys.maxsize
        self.waiting = WaitingRequests(policy)
        self._adapters = AdapterPlaces(max_loras)
        self.running: list[Request] = []
        # Of these, those that go on decoding. They come first in each plan, with half of its tokens
        # at most, or a prompt whose turn is earlier would have to wait for them.
        self._decodes = DecodeBatch()
        self._max_decodes = max_num_batched_tokens // 2
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        # Slots whose rows the executor still holds for nobody; told by the next plan.
        self._finished_slots: list[int] = []
        self._needs_reset = False
        # Of the last plan, to hand out again if the next one has the same.
        self._last_slots: Sequence[int] = ()
        self._last_counts: Sequence[int] = ()

    @classmethod
    def from_config(cls, config: EngineConfig, properties: ExecutorProperties) -> Scheduler:
        """A scheduler and its blocks, for an engine's options and the executor that it loaded."""
        kv_cache = KVCacheManager(
            properties.num_blocks,
            properties.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        return cls(
            kv_cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=(
                config.max_num_batched_tokens or properties.default_max_num_batched_tokens
            ),
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            max_loras=config.max_loras,
        )

    @property
    def num_excess_requests(self) -> int:
        """How many more requests wait than there are free slots; less than 0 if there is room."""
        # Those for which a slot is free do not wait, they have only not been planned yet.
        return len(self.waiting) - len(self._free_slots)

    @property
    def lora_ids(self) -> Set[int]:
        """Adapters that running requests use."""
        return self._adapters.lora_ids

    @property
    def num_departures(self) -> int:
        """How often a request has left the decode batch."""
        return self._decodes.num_departures

    @property
    def has_runnable_requests(self) -> bool:
        """Whether any request could be in a step, if there is room for it."""
        return bool(self.running) or self.waiting.any_queued

    @property
    def has_started_requests(self) -> bool:
        """Whether any request here has started, preempted ones included."""
        # Whoever waits for a place for its adapter waits for one that runs.
        return bool(self.running) or self.waiting.any_preempted

    def remove(self, request: Request) -> None:
        """Forgets a request that ends, wherever it is; its slot and blocks are free at once."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._decodes.leave(request)
            self._release(request)
        else:
            self.waiting.end(request)

    def schedule(self, plan_id: int, *, admit: bool) -> ScheduledStep:
        """Plans the next step.

        Args:
            plan_id: for the plan.
            admit: whether new requests may start; preempted ones may in any case.

        Returns:
            The step; without rows if nothing can run now, though it may have preempted.
        """
        plan = StepPlan(plan_id=plan_id, slots=(), num_scheduled_tokens=())
        if self._only_decodes:
            step = ScheduledStep.of_decodes(plan, self._decodes.rows())
            self._decodes.num_plans += 1
        else:
            step = self._draft(plan, admit=admit)
        if not step.requests:
            return step  # changes to rows wait for a plan that is launched
        self._use_again(plan)
        plan.reset, self._needs_reset = self._needs_reset, False
        plan.finished_slots, self._finished_slots = self._finished_slots, []
        return step

    def settle(self, step: ScheduledStep) -> None:
        """A step has run, and all before it: its blocks hold what they were planned to hold.

        Call it before the step's tokens end any request. What is full can be found from now on,
        but for rows that were preempted since: their blocks are others' (rule 3).
        """
        for request, num_preemptions, num_tokens, samples in step.computed:
            is_gone = request.status is not RequestStatus.RUNNING
            if is_gone or request.num_preemptions != num_preemptions:
                continue
            # A roll-back has such a request compute its prompt again, in the same blocks.
            if samples or not request.needs_whole_prompt:
                self.kv_cache.cache_blocks(request, num_tokens)
            request.is_caught_up = request.is_caught_up or samples

    def preempt_all(self) -> list[Request]:
        """Takes slots and blocks of all running requests, which keep their turns.

        Only while no plan is in flight. Tokens are kept.
        """
        preempted = list(self.running)
        while self.running:
            self._preempt_last()
        return preempted

    def roll_back(self, steps: Iterable[ScheduledStep]) -> None:
        """Undoes steps that did not run or do not count, in any order (rule 6).

        Requests go back to their last settled token; the executor gets all rows anew, as plans
        that carried changes were dropped. The caller forgets the steps, so no late result of
        theirs finds a row.
        """
        self._decodes.leave_all()
        for step in steps:
            # Before a row decodes all its tokens but the newest are computed.
            starts = [len(request.token_ids) - 1 for request in step.decodes.requests]
            rows = zip(step.requests, [*starts, *step.starts], step.samples, strict=True)
            for request, start, samples in rows:
                if request.is_finished:
                    continue
                request.num_unsettled_tokens -= samples
                # Less than the start if it was preempted since: then nothing is computed.
                request.num_planned_tokens = min(request.num_planned_tokens, start)
        for request in self.running:
            request.is_resident = False
            if request.needs_whole_prompt:
                request.num_planned_tokens = 0
            # If it was preempted since and has resumed, the start was of other blocks; below
            # this are blocks that it shares, and must not compute again.
            if request.num_planned_tokens < request.num_cached_tokens:
                request.num_planned_tokens = request.num_cached_tokens
        self._finished_slots.clear()
        self._needs_reset = True

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, slots and blocks agree."""
        waiting = list(self.waiting)
        assert not set(self.running) & set(waiting), "a request is in two queues"
        assert self.running == sorted(self.running, key=_TURN), "running requests are out of turn"
        slots = [request.slot for request in self.running]
        all_slots = sorted(slots + self._free_slots)
        assert all_slots == list(range(len(all_slots))), "a slot is lost or doubled"
        for request in self.running:
            assert request.status is RequestStatus.RUNNING, f"{request} in running"
        self._adapters.check_integrity(self.running)
        self._decodes.check_integrity([*self.running, *waiting])
        self.waiting.check_integrity()
        self.kv_cache.check_integrity(self.running)

    # Inside

    @property
    def _only_decodes(self) -> bool:
        """Whether the next plan is the decode batch, of which nobody must be looked at."""
        nobody_starts = not (self._free_slots and self.waiting.any_queued)
        return nobody_starts and self._decodes.are_all(len(self.running))

    def _draft(self, plan: StepPlan, *, admit: bool) -> ScheduledStep:
        draft = StepDraft(plan, self.max_num_batched_tokens)
        self._schedule_running(draft)
        if not draft.preempted:
            self._schedule_waiting(draft, admit=admit)
        step = draft.finish(self._decodes.rows())
        if step.requests:
            self._decodes.num_plans += 1
            for request, num_plain_tokens in draft.joining:
                self._decodes.join(request, num_plain_tokens)
        return step

    def _schedule_running(self, draft: StepDraft) -> None:
        decodes = self._decodes
        self._look_at_due(draft)
        draft.budget -= len(decodes)
        if len(decodes) == len(self.running):
            return
        # Victims are behind, never among those that were passed.
        for request in [request for request in self.running if request.decode_offset is None]:
            if request.status is RequestStatus.RUNNING:
                self._plan_row(draft, request)

    def _look_at_due(self, draft: StepDraft) -> None:
        """Members of the decode batch get a block more, or leave it and are planned as others."""
        decodes = self._decodes
        due = decodes.take_due()
        # Nobody who runs needs more than one. If any could go without, all take their turns.
        num_wanted = len(due) + len(self.running) - len(decodes)
        has_room = num_wanted <= self.kv_cache.pool.num_free_blocks
        growing: list[Request] = []
        for request in due:
            if has_room and decodes.num_planned_tokens(request) < _last_plain_token(request):
                growing.append(request)
            else:
                decodes.leave(request)
        self.kv_cache.add_block(growing)
        for request in growing:
            num_tokens = decodes.num_planned_tokens(request) + 1
            draft.computed.append((request, request.num_preemptions, num_tokens, True))
            draft.plan.new_block_ids.append((request.slot, request.block_ids[-1:]))
            decodes.extend(request, self._num_plain_tokens(request))

    def _plan_row(self, draft: StepDraft, request: Request) -> None:
        """Plans what a running request may compute, if anything, unless it is preempted."""
        num_tokens = self._num_tokens(draft, request)
        if num_tokens == 0:
            return
        new_block_ids = self._grow(draft, request, num_tokens)
        if new_block_ids is not None:
            self._append_row(draft, request, num_tokens, new_block_ids)

    def _grow(self, draft: StepDraft, request: Request, num_tokens: int) -> list[int] | None:
        """Room for more tokens, at the cost of the last; None if that is the request."""
        target = request.num_planned_tokens + num_tokens
        while (new_block_ids := self.kv_cache.grow(request, target)) is None:
            victim = self._preempt_last()
            draft.preempted.append(victim)
            if victim is request:
                return None
        return new_block_ids

    def _schedule_waiting(self, draft: StepDraft, *, admit: bool) -> None:
        while draft.budget > 0 and self._free_slots:
            request = self._next_waiting(admit=admit)
            # Its replay would lack the token that is still in flight (rule 5). Nobody overtakes.
            if request is None or request.num_unsettled_tokens:
                break
            # Blocks for all its tokens at once, also if it then starts with a chunk of them: two
            # half-computed prompts must not take each other's room.
            if not self.kv_cache.admit(request):
                break
            self.waiting.take(request)
            request.advance(RequestEvent.SCHEDULE)
            request.slot = self._free_slots.pop()
            if self.running and request.turn < self.running[-1].turn:
                insort(self.running, request, key=_TURN)
            else:
                self.running.append(request)  # first come, first served, it always is the last
            self._adapters.take(request)
            draft.resumed.append(request)
            self._append_row(draft, request, self._num_tokens(draft, request), [])

    def _next_waiting(self, *, admit: bool) -> Request | None:
        """Whose turn it is; who has no place for its adapter is put aside on the way."""
        while True:
            request = self.waiting.peek(admit=admit)
            if request is None or self._adapters.has_place(request):
                return request
            self.waiting.hold_up(request)

    def _num_tokens(self, draft: StepDraft, request: Request) -> int:
        return min(request.num_tokens_to_plan, self._max_tokens_per_row, draft.budget)

    def _append_row(
        self, draft: StepDraft, request: Request, num_tokens: int, new_block_ids: list[int]
    ) -> None:
        start = request.num_planned_tokens
        end = start + num_tokens
        samples = end == len(request.token_ids) + request.num_unsettled_tokens
        draft.append(request, num_tokens, samples=samples)
        if not request.is_resident:
            draft.plan.new_rows.append(make_row(request))
            request.is_resident = True
        elif new_block_ids:
            draft.plan.new_block_ids.append((request.slot, new_block_ids))
        request.num_planned_tokens = end
        request.num_unsettled_tokens += samples
        num_decodes = len(self._decodes) + len(draft.joining)
        if samples and num_decodes < self._max_decodes and end < _last_plain_token(request):
            draft.joining.append((request, self._num_plain_tokens(request)))

    def _num_plain_tokens(self, request: Request) -> int:
        """Tokens up to which it can be planned one by one and not be looked at."""
        room = len(request.block_ids) * self.kv_cache.block_size
        return min(room, _last_plain_token(request))

    def _use_again(self, plan: StepPlan) -> None:
        # The same objects tell the executor without a look that it is the same batch.
        if plan.slots is not self._last_slots and plan.slots != self._last_slots:
            self._last_slots = plan.slots
        counts = plan.num_scheduled_tokens
        if counts is not self._last_counts and counts != self._last_counts:
            self._last_counts = counts
        plan.slots, plan.num_scheduled_tokens = self._last_slots, self._last_counts

    def _preempt_last(self) -> Request:
        request = self.running.pop()
        self._decodes.leave(request)
        request.advance(RequestEvent.PREEMPT)
        self._release(request)
        request.num_planned_tokens = 0
        request.num_preemptions += 1
        self.waiting.add_preempted(request)
        return request

    def _release(self, request: Request) -> None:
        if request.is_caught_up:
            self.kv_cache.cache_blocks(request, len(request.token_ids) - 1)
        self.kv_cache.free(request)
        if self._adapters.free(request):
            self.waiting.release_held_up()
        self._free_slots.append(request.slot)
        if request.is_resident:
            self._finished_slots.append(request.slot)
        request.is_resident = request.is_caught_up = False
        request.slot = NO_SLOT


def _last_plain_token(request: Request) -> int:
    """How many tokens can be planned before the one whose result reaches the length limit."""
    return request.max_total_tokens - 2
