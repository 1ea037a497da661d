"""The engine core: requests in, plans out, results in, outputs into outboxes. Never waits.

Pure. All of it runs on one thread; the pipeline's rules (``docs/design/pipeline.md``) are kept
here and in the scheduler. Tasks around it only move messages. One class in one file, because the
table, the scheduler and the outboxes must change together, and do so nowhere else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trio_engine.core.admission import Admission
from trio_engine.core.kv_cache import effective_max_model_len
from trio_engine.core.lifecycle import RequestEvent
from trio_engine.core.metrics import RequestMetrics
from trio_engine.core.outbox import Outbox
from trio_engine.core.pause import PauseState
from trio_engine.core.pending_grammars import PendingGrammars, describe_failure
from trio_engine.core.request import Request
from trio_engine.core.scheduler import Scheduler
from trio_engine.core.statistics import count_core
from trio_engine.core.steps_in_flight import StepsInFlight
from trio_engine.core.stop import check_stop
from trio_engine.core.token_delivery import TokenDelivery
from trio_engine.errors import OverloadedError, RequestError, RequestStepError, brief
from trio_engine.outputs import FinishReason
from trio_engine.requests import PauseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import ExecutorProperties, RowGrammar, StepPlan, StepResult
    from trio_engine.core.statistics import EngineCoreStatistics
    from trio_engine.requests import EngineCoreRequest, SleepTag

logger = logging.getLogger(__name__)

# Requests that wait beyond those that may start. Fewer may have come and gone before somebody who
# does not hurry because they wait is back: slots would be free that they could have had.
LEAST_AMPLE_BACKLOG = 32


class EngineCore:
    """Scheduler, request table and outboxes of one engine.

    Args:
        config: limits; what it leaves open the executor's properties decide.
        properties: of the loaded executor.
        num_clients: outboxes to keep; ``client_index`` selects one.
        clock: monotonic, in seconds; timestamps of events and messages.
        engine_index: rank of this engine, told in every message.

    Attributes:
        pause_state: whether a pause is on, and what memory sleeps under it.

    Counterpart: ``vllm/v1/engine/core.py`` ``EngineCore``, whose ``step()`` schedules, runs and
    updates in one blocking call; here these are three, so that two plans can be in flight.
    """

    def __init__(
        self,
        config: EngineConfig,
        properties: ExecutorProperties,
        *,
        num_clients: int,
        clock: Callable[[], float],
        engine_index: int = 0,
    ) -> None:
        self.max_model_len = effective_max_model_len(config, properties)
        self.pause_state = PauseState()
        self.outboxes = [
            Outbox(index, engine_index, limit_bytes=config.outbox_limit_bytes)
            for index in range(num_clients)
        ]
        self._admission = Admission(
            vocab_size=properties.vocab_size,
            max_model_len=self.max_model_len,
            hidden_size=properties.hidden_size,
            enable_lora=config.enable_lora,
            max_waiting_requests=config.max_waiting_requests,
        )
        self._metrics = RequestMetrics(
            clock, enabled=config.log_stats, caches_prefixes=config.enable_prefix_caching
        )
        self._scheduler = Scheduler.from_config(config, properties)
        self._delivery = TokenDelivery(
            self.outboxes, vocab_size=properties.vocab_size, end_if_due=self._end_if_due
        )
        self._requests: dict[tuple[int, str], Request] = {}
        self._steps = StepsInFlight()
        self._num_steps = 0
        self._is_draining = False
        self._stats_are_stale = False
        self._ample_backlog = max(LEAST_AMPLE_BACKLOG, config.max_num_seqs)

    # What comes in

    def add(self, request: EngineCoreRequest) -> None:
        """Takes a request; whatever becomes of it is told in its client's outbox.

        A request that can never be served ends with ERROR, one that comes while draining with
        ABORT. Under a live id of the same client the newcomer is dropped with a log line: any
        output under that id would end the first one.
        """
        client_index, request_id = request.client_index, request.request_id
        has_client = 0 <= client_index < len(self.outboxes)
        if not has_client or (client_index, request_id) in self._requests:
            reason = "id is live" if has_client else "no such client"
            shown = brief(repr(request_id))
            logger.warning(
                "add_dropped request_id=%s client=%d reason=%r", shown, client_index, reason
            )
            return
        if self._is_draining:
            self._refuse(request, FinishReason.ABORT, None)
            return
        try:
            self._admit(request)
        except (RequestError, OverloadedError) as error:
            logger.warning("add_refused request_id=%s reason=%s", brief(repr(request_id)), error)
            self._refuse(request, FinishReason.ERROR, str(error))

    def refuse(
        self,
        client_index: int,
        request_id: str,
        why: str | None = None,
        *,
        is_pooling: bool = False,
    ) -> None:
        """Ends with ERROR a request of which nothing but its id could be read.

        ``why`` becomes its stop reason. A live request under this id is not touched.
        """
        has_client = 0 <= client_index < len(self.outboxes)
        if has_client and (client_index, request_id) not in self._requests:
            outbox = self.outboxes[client_index]
            outbox.refuse(request_id, FinishReason.ERROR, why, is_pooling=is_pooling)

    def abort(self, client_index: int, request_ids: Iterable[str]) -> None:
        """Ends requests of a client at its wish: no output, but told as finished.

        Blocks and slots are free at once, also while a plan in flight computes the rows (rules 2
        and 3). Unknown and finished ids mean nothing.
        """
        for request_id in request_ids:
            request = self._requests.get((client_index, request_id))
            if request is not None:
                self._end(request, RequestEvent.ABORT)
                self.outboxes[client_index].drop(request)

    def abort_all(self) -> None:
        """Ends every request by an ABORT output."""
        self._finish_many(list(self._requests.values()), RequestEvent.ABORT, FinishReason.ABORT)

    def start_draining(self) -> None:
        """From now on new requests get ABORT; those that are here may finish. A pause ends.

        While memory sleeps they get ABORT too: who had it given back may use it elsewhere.
        """
        self._is_draining = True
        self.pause_state.end("the engine is shutting down")
        if self.pause_state.asleep:
            self.abort_all()

    @property
    def pending_grammars(self) -> PendingGrammars:
        """Requests that wait for ``put_grammar``."""
        return self._scheduler.waiting.pending_grammars

    def put_grammar(self, request: Request, grammar: RowGrammar | str) -> None:
        """A request's grammar is compiled, or why it is not; then it ends with ERROR.

        It may have ended meanwhile: then this means nothing.
        """
        if request.is_finished:
            return
        if isinstance(grammar, str):
            self._fail_grammar(request, grammar)
        else:
            self._scheduler.waiting.put_grammar(request, grammar)
        self._stats_are_stale = True

    # The pipeline

    def schedule(self) -> StepPlan | None:
        """Plans the next step, to be launched after all earlier ones.

        At most one plan may be unsettled when this is called.

        Returns:
            The plan, or None if nothing can run until something else happens.
        """
        assert len(self._steps) <= 1, "two plans are unsettled"
        if self.pause_state.freezes_all:
            return None
        step = self._scheduler.schedule(self._num_steps, admit=not self.pause_state.is_on)
        if step.preempted or step.resumed:
            self._metrics.note_moves(step)
        if not step.requests:
            return None
        self._num_steps += 1
        self._steps.add(step)
        return step.plan

    def update(self, result: StepResult) -> None:
        """Settles the oldest plan: tokens go to requests and outboxes.

        Raises:
            StepError: the result does not fit the plan; the executor is broken.
        """
        step = self._steps.settle(result)
        self._scheduler.settle(step)
        if result.grammar_ends:
            for request, why in step.grammar_failures(result.grammar_ends):
                self._fail_grammar(request, why)
        told = self._delivery.deliver(step, result, self._scheduler.num_departures)
        self._end_overflowing_clients()
        # Of the clients that get something, the first is told the gauges; if none does, client 0.
        self._put_stats(self.outboxes[min(told, default=0)])

    def fail(self, plan_id: int, error: RequestStepError) -> None:
        """Takes the failure of a plan that was caused by some of its rows (rule 6).

        These requests end with ERROR. The plan and all behind it do not count; the other rows
        are planned again, as new rows.
        """
        steps, in_rows = self._steps.fail(plan_id, error)
        self._scheduler.roll_back(steps)
        at_fault = [request for request in in_rows if not request.is_finished]
        self._fail("step_failed", logging.ERROR, at_fault, str(error))

    # Control

    def pause(self, mode: PauseMode) -> int:
        """Stops planning by ``mode``; requests that come meanwhile queue until ``resume``.

        ABORT ends everything here; WAIT lets what has started finish; KEEP freezes all of it.
        ``is_quiescent`` tells when nothing runs any more.

        Returns:
            The pause's number, by which ``pause_state`` tells whether it is still on.
        """
        if mode is PauseMode.ABORT:
            self.abort_all()
        return self.pause_state.begin(mode)

    def resume(self) -> None:
        """Ends a pause; RequestError while memory sleeps."""
        self.pause_state.resume()

    def preempt_all(self) -> None:
        """Takes the blocks of all running requests; they are computed again. Not in flight."""
        assert not self._steps, "plans are in flight"
        for request in self._scheduler.preempt_all():
            self._metrics.note_preempted(request)
            self._stats_are_stale = True

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forgets all cached blocks, as after a change of the weights. Not in flight.

        Returns whether it was done: not while blocks are held; ``reset_running`` takes them.
        """
        if reset_running:
            self.preempt_all()
        is_reset = self._scheduler.kv_cache.reset_prefix_cache()
        if is_reset:
            self._metrics.note_cache_reset()
            self._stats_are_stale = True
        return is_reset

    def fall_asleep(self, tags: Iterable[SleepTag]) -> None:
        """Before the executor gives memory back: nobody holds blocks, nothing is cached or planned.

        Not in flight; ``pause_state.wake_up`` is the way back.
        """
        self.reset_prefix_cache(reset_running=True)
        self.pause_state.fall_asleep(tags)

    # What is so

    @property
    def num_plans_in_flight(self) -> int:
        """Plans launched and not settled."""
        return len(self._steps)

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    @property
    def has_runnable_requests(self) -> bool:
        """Whether a request runs or may start, and no pause is on."""
        return self._scheduler.has_runnable_requests and not self.pause_state.is_on

    @property
    def is_backed_up(self) -> bool:
        """Whether another whole batch of requests waits, and not only a few."""
        return self._scheduler.num_excess_requests > self._ample_backlog

    @property
    def has_running_requests(self) -> bool:
        """Whether any request has started and not ended, preempted ones included."""
        return self._scheduler.has_started_requests

    @property
    def lora_ids(self) -> Set[int]:
        """Adapters that running requests use."""
        return self._scheduler.lora_ids

    @property
    def is_quiescent(self) -> bool:
        """Whether a pause has come to rest: nothing in flight and nothing that may run."""
        if self._steps:
            return False
        return self.pause_state.freezes_all or not self.has_running_requests

    @property
    def running_request_ids(self) -> list[str]:
        """Ids in the oldest plan in flight, else of all running requests; for a death record."""
        requests = self._steps.oldest_requests or self._scheduler.running
        return [request.request_id for request in requests]

    def statistics(self) -> EngineCoreStatistics:
        """Counts at this moment."""
        return count_core(
            self._scheduler,
            self._metrics,
            num_plans_in_flight=len(self._steps),
            num_steps=self._num_steps,
            is_paused=self.pause_state.is_on,
            is_asleep=bool(self.pause_state.asleep),
            is_draining=self._is_draining,
        )

    def flush_stats(self) -> None:
        """Tells gauges that changed without a step, as by an abort, or an ADD during a pause."""
        if self._stats_are_stale:
            self._put_stats(self.outboxes[0])

    def check_integrity(self) -> None:
        """Raises AssertionError unless tables, queues, slots and blocks agree."""
        self._scheduler.check_integrity()
        queued = {*self._scheduler.running, *self._scheduler.waiting}
        assert queued == set(self._requests.values()), "table and queues differ"
        for key, request in self._requests.items():
            assert request.key == key, f"{request} stands under {key}"
            assert not request.is_finished, f"{request} is still in the table"

    # Inside

    def _admit(self, source: EngineCoreRequest) -> None:
        params = self._admission.check_request(source)
        self._admission.check_load(self._scheduler, self.outboxes[source.client_index])
        request = Request(source, params, self.max_model_len)
        if source.abort_immediately:
            self.outboxes[request.client_index].drop(request)
            return
        self._requests[request.key] = request
        self._scheduler.waiting.add(request)
        self._metrics.note_queued(request)
        self._stats_are_stale = True

    def _refuse(self, request: EngineCoreRequest, reason: FinishReason, why: str | None) -> None:
        self.outboxes[request.client_index].refuse(
            request.request_id, reason, why, is_pooling=request.pooling_params is not None
        )

    def _end_if_due(self, request: Request, token_id: int, *, grammar_ended: bool = False) -> None:
        decision = check_stop(request, token_id, grammar_ended=grammar_ended)
        if decision is not None:
            self._end(request, RequestEvent.STOP)
            self.outboxes[request.client_index].finish(request, *decision)

    def _end(self, request: Request, event: RequestEvent) -> None:
        self._scheduler.remove(request)
        request.advance(event)
        del self._requests[request.key]
        self._stats_are_stale = True

    def _fail_grammar(self, request: Request, why: str) -> None:
        # No fault of the engine's: the client asked for it.
        self._fail("grammar_failed", logging.WARNING, [request], describe_failure(request, why))

    def _fail(self, event: str, level: int, requests: Sequence[Request], reason: str) -> None:
        for request in requests:
            shown = brief(repr(request.request_id))
            logger.log(level, "%s request_id=%s reason=%r", event, shown, reason)
        self._finish_many(requests, RequestEvent.FAIL, FinishReason.ERROR, reason)

    def _finish_many(
        self,
        requests: Iterable[Request],
        event: RequestEvent,
        reason: FinishReason,
        stop_reason: str | None = None,
    ) -> None:
        for request in requests:
            self._end(request, event)
            self.outboxes[request.client_index].finish(request, reason, stop_reason)

    def _end_overflowing_clients(self) -> None:
        for outbox in self.outboxes:
            if not outbox.is_full:
                continue
            client = outbox.client_index
            requests = [r for r in self._requests.values() if r.client_index == client]
            if requests:
                sizes = (client, outbox.num_bytes, len(requests))
                logger.error("client_overflow client=%d unsent_bytes=%d requests=%d", *sizes)
            why = "its client does not read its outputs"
            self._finish_many(requests, RequestEvent.FAIL, FinishReason.ERROR, why)

    def _put_stats(self, outbox: Outbox) -> None:
        self._stats_are_stale = False
        if self._metrics.enabled:
            outbox.put_scheduler_stats(self._metrics.take_scheduler_stats(self._scheduler))
