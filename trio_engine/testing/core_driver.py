"""Drives an ``EngineCore`` and an executor in one thread, one small move at a time.

Pure but for the executor. The moves are those that the step loop and the forward thread make, in
any order that they could make them in; a test chooses the order and so meets every interleaving.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from trio_engine.errors import RequestStepError
from trio_engine.outputs import EngineCoreOutput, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.engine_core import EngineCore
    from trio_engine.core.plan import RowGrammar, StepPlan
    from trio_engine.core.request import Request
    from trio_engine.executor.base import Executor
    from trio_engine.sampling_params import StructuredOutputsParams


class RequestLog(msgspec.Struct):
    """What one client heard of one life of a request id.

    Attributes:
        token_ids: in the order heard.
        finish_reason: of its terminal output, None before it and after an abort.
        outputs: the entries themselves.
    """

    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    outputs: list[EngineCoreOutput] = msgspec.field(default_factory=list)


class CoreDriver:
    """The pipeline around a core, without threads and tasks.

    Args:
        core: with outboxes for the clients to listen for.
        executor: loaded.
        pipeline_depth: plans in flight.
        compile_grammar: makes a request's grammar, or says why it cannot.

    Attributes:
        logs: by (client_index, request_id), the latest life of each id. An output for an id
            without a log, or after a terminal one, raises AssertionError.
        finished_ids: by client, ids heard as finished.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        *,
        pipeline_depth: int = 2,
        compile_grammar: Callable[[StructuredOutputsParams], RowGrammar | str] | None = None,
    ) -> None:
        self.core = core
        self.executor = executor
        self.pipeline_depth = pipeline_depth
        self.logs: dict[tuple[int, str], RequestLog] = {}
        self.finished_ids: list[set[str]] = [set() for _ in core.outboxes]
        self._compile = compile_grammar
        self._uncompiled: deque[Request] = deque()
        self._submitted: deque[StepPlan] = deque()
        self._launched: deque[StepPlan] = deque()

    @property
    def can_schedule(self) -> bool:
        """Whether the step loop would plan now."""
        return self.core.num_plans_in_flight < self.pipeline_depth

    @property
    def can_launch(self) -> bool:
        """Whether the forward thread could launch now."""
        room = 2 if self.executor.launches_ahead else 1
        return bool(self._submitted) and len(self._launched) < room

    @property
    def can_collect(self) -> bool:
        """Whether a launched plan waits for its result."""
        return bool(self._launched)

    def listen(self, client_index: int, request_id: str) -> RequestLog:
        """Starts the log of a request's life; call it before the request is added."""
        log = RequestLog()
        self.logs[(client_index, request_id)] = log
        return log

    def compile_grammar(self) -> bool:
        """Hands in the grammar that was first asked for; False if none is."""
        new, _ = self.core.pending_grammars.take_news()
        self._uncompiled += new
        if not self._uncompiled:
            return False
        request = self._uncompiled.popleft()
        params = request.sampling_params.structured_outputs
        assert params is not None
        assert self._compile is not None, "no way to compile was given"
        # Also for a request that has ended since: what comes too late must mean nothing.
        self.core.put_grammar(request, self._compile(params))
        return True

    def schedule(self) -> bool:
        """Plans a step; False if nothing could run."""
        plan = self.core.schedule()
        if plan is None:
            return False
        self._submitted.append(plan)
        return True

    def launch(self) -> None:
        """Hands the next plan to the executor."""
        plan = self._submitted.popleft()
        try:
            self.executor.launch(plan)
        except RequestStepError as error:
            # Plans before it are good: they settle first. Should one of those fail, then this
            # plan is behind a failed one and does not count anyway.
            while self._launched:
                if not self.collect():
                    return
            self._fail(plan, error)
        else:
            self._launched.append(plan)

    def collect(self) -> bool:
        """Takes the oldest result and settles it; False if its plan failed."""
        plan = self._launched.popleft()
        try:
            result = self.executor.collect()
        except RequestStepError as error:
            self._fail(plan, error)
            return False
        self.core.update(result)
        return True

    def run_until_idle(self, max_steps: int = 10_000) -> None:
        """``settle_all`` and ``receive``."""
        self.settle_all(max_steps)
        self.receive()

    def settle_all(self, max_steps: int = 10_000) -> None:
        """Makes moves in the plainest order until nothing is left to do.

        Raises:
            AssertionError: something is left after ``max_steps`` plans.
        """
        last_plan = self.core.statistics().num_steps + max_steps
        while True:
            while self.compile_grammar():
                pass
            while self.can_schedule and self.schedule():
                pass
            if self.can_launch:
                self.launch()
            elif self.can_collect:
                self.collect()
            else:
                break
            num_steps = self.core.statistics().num_steps
            assert num_steps <= last_plan, f"no end after {max_steps} plans"

    def receive(self) -> None:
        """Empties the outboxes into the logs, as clients would."""
        for client_index, outbox in enumerate(self.core.outboxes):
            for message in outbox.take(0.0):
                for output in message.outputs:
                    self._log_output(client_index, output)
                self.finished_ids[client_index] |= message.finished_requests or set()

    def _log_output(self, client_index: int, output: EngineCoreOutput) -> None:
        log = self.logs.get((client_index, output.request_id))
        assert log is not None, f"output for {output.request_id!r}, which nobody added"
        assert log.finish_reason is None, f"output after the end of {output.request_id!r}"
        log.outputs.append(output)
        log.token_ids.extend(output.new_token_ids)
        log.finish_reason = output.finish_reason

    def _fail(self, plan: StepPlan, error: RequestStepError) -> None:
        """Drops what is behind the failed plan: not launched, or collected and ignored."""
        for _ in self._launched:
            with contextlib.suppress(RequestStepError):
                self.executor.collect()
        self._launched.clear()
        self._submitted.clear()
        self.core.fail(plan.plan_id, error)
