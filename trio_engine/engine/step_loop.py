"""The step loop: the one task that touches the core, with one await, its doorbell.

Engine. Each turn takes in all messages and results that have come, plans as far as the pipeline
allows, and has the writers send what is new. It never polls and never waits for a send.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trio_engine.core.plan import DeviceCommand, StepResult
from trio_engine.core.step_phases import StepPhase, StepPhases
from trio_engine.engine.forward_thread import Broken, CommandDone, Loaded, StepFailed
from trio_engine.engine.inbox import Inbox
from trio_engine.errors import StepError, brief
from trio_engine.outputs import UtilityOutput
from trio_engine.requests import EngineCoreRequest
from trio_engine.wire.codec import UndecodableRequest
from trio_engine.wire.messages import AbortRequest, UtilityCall

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from trio_engine.core.engine_core import EngineCore
    from trio_engine.core.plan import RowGrammar
    from trio_engine.core.request import Request
    from trio_engine.core.statistics import EngineCoreStatistics
    from trio_engine.engine.doorbell import Doorbell, ThreadSafeDoorbell
    from trio_engine.engine.forward_thread import ForwardEvent, ForwardThread
    from trio_engine.engine.grammar_service import GrammarService
    from trio_engine.engine.inbox import Arrival

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "Server shutting down"


class StepLoop:
    """Moves messages, plans, results and outputs around one core.

    Args:
        core: the core; no other task touches it while ``run`` runs.
        forward: the thread of the executor that the core was made for; its events must ring
            ``doorbell``.
        pipeline_depth: plans in flight, 1 or 2.
        doorbell: rung whenever there may be something to do.
        on_output: called with a client's index when its outbox has something new; must not wait.

    Attributes:
        inbox: where readers put what came.
        start_utility_call: takes a utility call; set by who owns the calls' nursery.
        grammars: compiles for requests that need it; set by the same.
        phases: where the time of steps goes.
    """

    def __init__(
        self,
        core: EngineCore,
        forward: ForwardThread,
        *,
        pipeline_depth: int,
        doorbell: Doorbell | ThreadSafeDoorbell,
        on_output: Callable[[int], object],
    ) -> None:
        self.core = core
        self.inbox = Inbox(doorbell)
        self.start_utility_call: Callable[[UtilityCall], object] = self.refuse_utility_call
        self.grammars: GrammarService | None = None
        self.phases = StepPhases(forward.device)
        self._forward = forward
        self._pipeline_depth = pipeline_depth
        self._doorbell = doorbell
        self._on_output = on_output
        self._is_draining = False
        self._num_holds = 0
        self._num_submitted = 0
        self._num_nudged = 0
        self._num_commands = 0
        self._commands: dict[int, _PendingCommand] = {}
        self._unanswered: list[UtilityCall] = []
        # Tasks that wait for something that turns bring about, and look after each.
        self._after_turn = trio.lowlevel.ParkingLot()

    async def run(self) -> None:
        """Works until a drain is complete.

        Raises:
            StepError: the executor failed; the engine must end.

        Cancellation: between two turns; what is in flight is left to the forward thread. Call
        ``abort_all`` then, so that every request has an end.
        """
        self._turn()
        while not (self._is_draining and not self.core.has_requests):
            await self._doorbell.wait()
            self._turn()

    def start_draining(self) -> None:
        """New requests and utility calls are refused from now on; ends ``run`` when all is done."""
        self._is_draining = True
        self.core.start_draining()
        self._doorbell.ring()

    async def refuse_all(self) -> None:
        """After ``run``, until cancelled: answers what still comes, by ``abort_all``."""
        while True:
            self.abort_all()
            await self._doorbell.wait()

    def abort_all(self) -> None:
        """Ends every request by an ABORT output, after ``run`` has been left.

        Messages in the inbox are taken first: requests there get ABORT, utility calls a failure,
        as do those that were still waited for.
        """
        self._is_draining = True
        self.core.start_draining()
        self._take_input()
        unanswered, self._unanswered = self._unanswered, []
        for call in unanswered:
            self.refuse_utility_call(call)
        self.core.abort_all()
        self._flush_outboxes()

    def answer(self, client_index: int, output: UtilityOutput, *, result_bytes: int = 0) -> None:
        """Puts a utility answer into its client's outbox; ``result_bytes`` as encoded."""
        outbox = self.core.outboxes[client_index]
        outbox.put_utility_output(output, result_bytes=result_bytes)
        self._on_output(client_index)

    def keep_unanswered(self, call: UtilityCall) -> None:
        """Leaves a call whose result will not come to ``abort_all``.

        Of an engine that dies there is no such answer: its clients hear of the death.
        """
        self._unanswered.append(call)

    def refuse_utility_call(self, call: UtilityCall) -> None:
        """Answers a call that will not be served any more."""
        self.answer(call.client_index, UtilityOutput(call.call_id, failure_message=SHUTTING_DOWN))

    def put_grammar(self, request: Request, grammar: RowGrammar | str) -> None:
        """Hands in what became of a request's grammar: compiled, or why not."""
        self.core.put_grammar(request, grammar)
        self._doorbell.ring()

    def ring(self) -> None:
        """Has the loop take a turn: the core was changed outside of one."""
        self._doorbell.ring()

    def is_backed_up(self) -> bool:
        """Whether a request that comes now can only wait, and long, beside others that run.

        While draining it does not wait: it is refused, for which it must be read before the end.
        """
        if self._is_draining:
            return False
        return self.core.num_plans_in_flight > 0 and self.core.is_backed_up

    def statistics(self) -> EngineCoreStatistics:
        """The core's counts, and where the time of its steps went."""
        return msgspec.structs.replace(self.core.statistics(), steps=self.phases.statistics())

    async def wait_paused(self, number: int) -> None:
        """Returns when a pause has come to rest: nothing runs any more.

        Raises:
            UtilityError: the pause was ended before.

        Cancellation: nothing is left behind.
        """
        await trio.lowlevel.checkpoint()
        while True:
            self.core.pause_state.check_on(number)
            if self.core.is_quiescent:
                return
            await self._after_turn.park()

    @asynccontextmanager
    async def planning_stopped(self) -> AsyncGenerator[None]:
        """A block in which no plan is in flight and none is made (rule 7).

        Cancellation: planning goes on.
        """
        self._num_holds += 1
        try:
            while self.core.num_plans_in_flight:
                await self._after_turn.park()
            yield
        finally:
            self._num_holds -= 1
            self._doorbell.ring()

    async def run_command(self, method: str, *args: Any) -> Any:
        """Has the executor do something between two plans, and returns what it returned.

        Raises:
            Exception: what the executor raised.

        Cancellation: the command may still run; its answer is dropped.
        """
        async with self.planning_stopped():
            pending = _PendingCommand()
            command_id = self._num_commands
            self._num_commands += 1
            self._commands[command_id] = pending
            try:
                self._forward.submit(DeviceCommand(command_id=command_id, method=method, args=args))
                done = await pending.wait()
            finally:
                del self._commands[command_id]
        if done.error is not None:
            raise done.error
        return done.value

    # One turn

    def _turn(self) -> None:
        phases = self.phases
        is_timed = phases.begin_turn()
        self._take_input()
        if is_timed:
            phases.mark(StepPhase.ADMIT)
        self._take_events()
        self._pass_on_grammars()
        if is_timed:
            phases.mark(StepPhase.SETTLE)
        self._note_known()
        self._plan()
        if is_timed:
            phases.mark(StepPhase.PLAN)
        if not self.core.num_plans_in_flight:
            self.core.flush_stats()
        if self._after_turn:
            self._after_turn.unpark_all()
        self._flush_outboxes()
        if is_timed:
            phases.end_turn(waits=self.core.num_plans_in_flight > 0)

    def _note_known(self) -> None:
        device = self.phases.device
        is_known = self.core.has_runnable_requests
        if is_known is not device.is_known:
            device.note_known(is_known)

    def _take_input(self) -> None:
        for arrival in self.inbox.take():
            self._take(arrival)

    def _take(self, arrival: Arrival) -> None:
        message = arrival.message
        if isinstance(message, EngineCoreRequest):
            self.core.add(message)
        elif isinstance(message, AbortRequest):
            self.core.abort(arrival.client_index, message.request_ids)
        elif isinstance(message, UtilityCall):
            self._take_utility_call(message)
        elif isinstance(message, UndecodableRequest):
            self._take_undecodable(arrival.client_index, message)
        else:
            logger.warning("message_dropped kind=%s", type(message).__name__)

    def _take_utility_call(self, call: UtilityCall) -> None:
        if not 0 <= call.client_index < len(self.core.outboxes):
            shown = brief(repr(call.method))
            logger.warning("call_dropped method=%s client=%d", shown, call.client_index)
        elif self._is_draining:
            self.refuse_utility_call(call)
        else:
            self.start_utility_call(call)

    def _take_undecodable(self, client_index: int, error: UndecodableRequest) -> None:
        logger.warning("message_undecodable client=%d reason='%s'", client_index, error)
        if error.request_id is not None:
            self.core.refuse(
                client_index, error.request_id, str(error), is_pooling=error.is_pooling
            )
        if error.call_id is not None:
            failure = f"Call failed: {error}"
            self.answer(client_index, UtilityOutput(error.call_id, failure_message=failure))

    def _pass_on_grammars(self) -> None:
        if not self.core.pending_grammars.has_news:
            return
        new, ended = self.core.pending_grammars.take_news()
        for request in ended:
            if self.grammars is not None:
                self.grammars.cancel(request)
        for request in new:
            if self.grammars is None:
                self.core.put_grammar(request, "this engine compiles no grammars")
            elif not request.is_finished:
                self.grammars.start(request)

    def _take_events(self) -> None:
        while self._forward.events:
            self._take_event(self._forward.events.popleft())

    def _take_event(self, event: ForwardEvent) -> None:
        if isinstance(event, StepResult):
            self.core.update(event)
        elif isinstance(event, StepFailed):
            self.core.fail(event.plan_id, event.error)
        elif isinstance(event, CommandDone):
            pending = self._commands.get(event.command_id)
            if pending is not None:
                pending.finish(event)
        elif isinstance(event, Broken):
            ids = self.core.running_request_ids
            raise StepError(f"the executor failed while it ran {ids}") from event.error
        else:
            assert not isinstance(event, Loaded), "loaded twice"

    def _plan(self) -> None:
        if self._num_holds == 0:
            while self.core.num_plans_in_flight < self._pipeline_depth:
                plan = self.core.schedule()
                if plan is None:
                    break
                self._forward.submit(plan)
                self._num_submitted += 1
        self._nudge_if_last()

    def _nudge_if_last(self) -> None:
        """Tells an executor that launches ahead not to wait for a plan behind the one it has."""
        if not self._forward.launches_ahead or self.core.num_plans_in_flight != 1:
            return
        if self._num_nudged != self._num_submitted:  # once for each plan is enough
            self._num_nudged = self._num_submitted
            self._forward.nudge()

    def _flush_outboxes(self) -> None:
        for outbox in self.core.outboxes:
            if not outbox.is_empty:
                self._on_output(outbox.client_index)


class _PendingCommand:
    """Where a task waits for the answer to its command."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._done: CommandDone | None = None

    def finish(self, done: CommandDone) -> None:
        self._done = done
        self._event.set()

    async def wait(self) -> CommandDone:
        await self._event.wait()
        assert self._done is not None
        return self._done
