"""An executor that answers what a test wrote down, at a pace that a test sets.

Public kit. Imports neither torch nor zmq nor pytest. Computes nothing and never waits: how long a
step takes is for ``timed_forward``, which sleeps by Trio's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.core.plan import NO_TOKEN, ExecutorProperties, StepResult
from trio_engine.errors import RequestError, RequestStepError
from trio_engine.executor.made_up_logprobs import MadeUpLogprobs
from trio_engine.executor.null import modelless_properties
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import DeviceCommand, NewRow, StepPlan

FILLER = b" "
"""What an answer without text is filled with where it must not end."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it reached the engine.

    Attributes:
        request_id: the caller's, and eight random hex digits.
        prompt: as text, a chat as the template wrote it; special tokens are spelled out.
        prompt_token_ids: what was sent.
        params: settled by the client.
    """

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams


AnswerFunction = Callable[[Asked], str]
"""Gives the text of an answer; what it raises ends the request with ERROR."""


class _Row(msgspec.Struct, eq=False):
    answer: list[int]
    params: SamplingParams
    num_prompt: int
    num_known: int
    num_computed: int


class FakeExecutor:
    """Answers by a function, once for each request.

    The answer ends with the end token where the request lets it; with ``ignore_eos``, and before
    ``min_tokens``, it begins again.

    Args:
        config: limits.
        encode: text to tokens.
        decode: tokens to text.
        eos_token_id: ends an answer; the last of the vocabulary.
        answer: what to say to whom.
        token_s: how long a step takes.
        prefill_s: how much longer one takes in which requests start.

    Attributes:
        launches_ahead: never.
        asked: the requests that were started, oldest first.
        step_s: how long the step takes that was launched last.
    """

    launches_ahead = False

    def __init__(
        self,
        config: EngineConfig,
        *,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        eos_token_id: int,
        answer: AnswerFunction,
        token_s: float = 0.0,
        prefill_s: float = 0.0,
    ) -> None:
        self.asked: list[Asked] = []
        self.step_s = 0.0
        self._config = config
        self._encode = encode
        self._decode = decode
        self._eos_token_id = eos_token_id
        self._answer = answer
        self._token_s = token_s
        self._prefill_s = prefill_s
        # By request id, so that one that is preempted and starts again is not asked twice.
        self._answers: dict[str, list[int]] = {}
        self._rows: dict[int, _Row] = {}
        self._logprobs = MadeUpLogprobs(eos_token_id + 1)
        self._launched: deque[StepPlan] = deque()

    def load(self) -> ExecutorProperties:
        """Nothing to load."""
        return msgspec.structs.replace(
            modelless_properties(self._config), vocab_size=self._eos_token_id + 1
        )

    def launch(self, plan: StepPlan) -> None:
        """Notes the plan, and asks for the answers of rows that start.

        Raises:
            RequestStepError: the answer function raised for one of them.
        """
        if plan.reset:
            self._rows.clear()
        for slot in plan.finished_slots:
            del self._rows[slot]
        for row in plan.new_rows:
            self._set_up(row)
        self.step_s = self._token_s + (self._prefill_s if plan.new_rows else 0.0)
        self._launched.append(plan)

    def collect(self) -> StepResult:
        """The oldest plan's tokens."""
        plan = self._launched.popleft()
        pairs = zip(plan.slots, plan.num_scheduled_tokens, strict=True)
        token_ids = [self._step(self._rows[slot], num_tokens) for slot, num_tokens in pairs]
        result = StepResult(plan_id=plan.plan_id, token_ids=token_ids)
        self._logprobs.put_into(result, plan.slots)
        return result

    def command(self, command: DeviceCommand) -> Any:
        """Sleeps and wakes up with nothing to give back."""
        if command.method not in ("sleep", "wake_up", "execute_dummy_batch"):
            raise RequestError(f"the fake executor has no method {command.method!r}")

    def shutdown(self) -> None:
        """Nothing to release."""

    def _set_up(self, row: NewRow) -> None:
        self._rows[row.slot] = _Row(
            self._answer_to(row),
            row.sampling_params,
            row.num_prompt_tokens,
            len(row.token_ids),
            row.num_computed_tokens,
        )
        self._logprobs.set_up(row)

    def _answer_to(self, row: NewRow) -> list[int]:
        if row.request_id not in self._answers:
            try:
                self._answers[row.request_id] = self._ask(row)
            except Exception as error:  # a test's own: it ends that request only
                raise RequestStepError(str(error) or repr(error), slots=[row.slot]) from error
        return self._answers[row.request_id]

    def _ask(self, row: NewRow) -> list[int]:
        prompt = row.token_ids[: row.num_prompt_tokens]
        asked = Asked(
            request_id=row.request_id,
            prompt=self._decode(prompt),
            prompt_token_ids=prompt,
            params=row.sampling_params,
        )
        self.asked.append(asked)
        return self._encode(self._answer(asked))

    def _step(self, row: _Row, num_tokens: int) -> int:
        row.num_computed += num_tokens
        if row.num_computed < row.num_known:
            return NO_TOKEN
        position = row.num_known - row.num_prompt
        row.num_known += 1
        if position < len(row.answer):
            return row.answer[position]
        may_end = row.params.eos_token_id is not None and position >= row.params.min_tokens
        if may_end:
            return self._eos_token_id
        again = row.answer or list(FILLER)
        return again[position % len(again)]
