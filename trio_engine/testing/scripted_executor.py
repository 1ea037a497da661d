"""An executor that a test plays by hand: it stops where told, fails when told, draws what is told.

Public kit. Imports neither torch nor zmq nor pytest.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import trio

from trio_engine.core.plan import NO_TOKEN, ExecutorProperties, StepResult
from trio_engine.errors import RequestError, RequestStepError
from trio_engine.executor.made_up_logprobs import MadeUpLogprobs
from trio_engine.executor.null import modelless_properties, null_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import DeviceCommand, NewRow, StepPlan

ExecutorCall = Literal["load", "launch", "collect", "command", "shutdown"]

GATE_TIMEOUT_S = 30.0
"""A test that forgets to open a gate fails after this instead of hanging."""


class Gate:
    """A place where the forward thread can be made to stop. Open at first.

    Everything but ``wait_held`` may be called on any thread.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_open = True
        self._num_passes = 0
        self._num_held = 0

    def close(self) -> None:
        """Holds whoever comes from now on."""
        with self._condition:
            self._is_open = False

    def open(self) -> None:
        """Lets go who is held and whoever comes."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def let_pass(self, count: int = 1) -> None:
        """Lets so many go on and keeps the gate closed."""
        with self._condition:
            self._num_passes += count
            self._condition.notify_all()

    async def wait_held(self) -> None:
        """Returns when a thread is held here. Cancellation: nothing is left behind."""
        held = await trio.to_thread.run_sync(self._wait_held, abandon_on_cancel=True)
        if not held:
            raise TimeoutError("nobody came to this gate")

    def pass_through(self) -> None:
        """Called by the executor: returns when the gate lets it."""
        with self._condition:
            self._num_held += 1
            self._condition.notify_all()
            try:
                if not self._condition.wait_for(self._may_pass, GATE_TIMEOUT_S):
                    raise TimeoutError("this gate was left closed")
                if not self._is_open:
                    self._num_passes -= 1
            finally:
                self._num_held -= 1

    def _may_pass(self) -> bool:
        return self._is_open or self._num_passes > 0

    def _wait_held(self) -> bool:
        with self._condition:
            return self._condition.wait_for(
                lambda: self._num_held > 0 and not self._may_pass(), GATE_TIMEOUT_S
            )


class _Row(msgspec.Struct, eq=False):
    request_id: str
    prompt: list[int]
    num_known: int
    num_computed: int


class ScriptedExecutor:
    """Computes nothing; a test decides when its calls return and what they give.

    Made by a test and handed to the engine by a factory that returns it. Keep the test's body in
    ``gates_open_at_end``, or a failing assertion leaves the forward thread held.

    Args:
        config: limits.
        launches_ahead: which order of calls to ask of the engine.
        tokens: output tokens by request id; positions beyond the end, and requests not named,
            get ``null_token``.

    Attributes:
        gates: by call. Each is passed before the call does anything.
        calls: what was called, oldest first: ``"launch 0"`` with the plan's id, ``"command echo"``
            with the method, the others by name. May be read on any thread.
        commands: what a command does, by method; ``"echo"`` gives back its arguments.

    Example::

        executor = ScriptedExecutor(config)
        with executor.gates_open_at_end():
            executor.gates["collect"].close()
            ...  # start the engine with lambda _: executor, add a request
            await executor.gates["collect"].wait_held()
            ...  # the step runs now, and goes on running
            executor.gates["collect"].let_pass()
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        launches_ahead: bool = False,
        tokens: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.launches_ahead = launches_ahead
        names: tuple[ExecutorCall, ...] = ("load", "launch", "collect", "command", "shutdown")
        self.gates: dict[ExecutorCall, Gate] = {name: Gate() for name in names}
        self.calls: list[str] = []
        self.commands: dict[str, Callable[..., Any]] = {"echo": lambda *args: list(args)}
        self._properties = modelless_properties(config)
        self._tokens = {} if tokens is None else tokens
        self._errors: dict[ExecutorCall, deque[BaseException]] = {name: deque() for name in names}
        self._requests_to_fail: dict[ExecutorCall, set[str]] = {"launch": set(), "collect": set()}
        self._rows: dict[int, _Row] = {}
        self._logprobs = MadeUpLogprobs(self._properties.vocab_size)
        self._launched: deque[tuple[StepPlan, StepResult]] = deque()

    @contextmanager
    def gates_open_at_end(self) -> Iterator[None]:
        """A block that opens all gates when it is left."""
        try:
            yield
        finally:
            for gate in self.gates.values():
                gate.open()

    def fail_next(self, call: ExecutorCall, error: BaseException) -> None:
        """Has the next such call raise, once it has passed its gate."""
        self._errors[call].append(error)

    def fail_requests(self, call: Literal["launch", "collect"], *request_ids: str) -> None:
        """Has the next plan with any of these requests raise ``RequestStepError`` for them."""
        self._requests_to_fail[call].update(request_ids)

    def load(self) -> ExecutorProperties:
        """Nothing to load."""
        self._enter("load", "load")
        return self._properties

    def launch(self, plan: StepPlan) -> None:
        """Applies the plan to the rows."""
        self._enter("launch", f"launch {plan.plan_id}")
        if plan.reset:
            self._rows.clear()
            self._launched.clear()
        for slot in plan.finished_slots:
            del self._rows[slot]
        for row in plan.new_rows:
            self._rows[row.slot] = _make_row(row)
            self._logprobs.set_up(row)
        self._fail_rows("launch", plan)
        pairs = zip(plan.slots, plan.num_scheduled_tokens, strict=True)
        token_ids = [self._step(self._rows[slot], num_tokens) for slot, num_tokens in pairs]
        result = StepResult(plan_id=plan.plan_id, token_ids=token_ids)
        self._logprobs.put_into(result, plan.slots)
        self._launched.append((plan, result))

    def collect(self) -> StepResult:
        """The oldest plan's tokens."""
        plan, result = self._launched.popleft()
        self._enter("collect", f"collect {plan.plan_id}")
        self._fail_rows("collect", plan)
        return result

    def command(self, command: DeviceCommand) -> Any:
        """Does what ``commands`` says."""
        self._enter("command", f"command {command.method}")
        do = self.commands.get(command.method)
        if do is None:
            raise RequestError(f"the scripted executor has no method {command.method!r}")
        return do(*command.args)

    def shutdown(self) -> None:
        """Nothing to release."""
        self._enter("shutdown", "shutdown")

    def _enter(self, call: ExecutorCall, words: str) -> None:
        self.calls.append(words)
        self.gates[call].pass_through()
        if self._errors[call]:
            raise self._errors[call].popleft()

    def _fail_rows(self, call: ExecutorCall, plan: StepPlan) -> None:
        ids = self._requests_to_fail[call]
        slots = [
            slot for slot in plan.slots if slot in self._rows and self._rows[slot].request_id in ids
        ]
        if slots:
            ids.difference_update(self._rows[slot].request_id for slot in slots)
            raise RequestStepError(f"plan {plan.plan_id} was made to fail", slots=slots)

    def _step(self, row: _Row, num_tokens: int) -> int:
        row.num_computed += num_tokens
        if row.num_computed < row.num_known:
            return NO_TOKEN
        position = row.num_known - len(row.prompt)
        row.num_known += 1
        scripted = self._tokens.get(row.request_id, ())
        if position < len(scripted):
            return scripted[position]
        return null_token(row.prompt, position)


def _make_row(row: NewRow) -> _Row:
    return _Row(
        row.request_id,
        row.token_ids[: row.num_prompt_tokens],
        len(row.token_ids),
        row.num_computed_tokens,
    )
