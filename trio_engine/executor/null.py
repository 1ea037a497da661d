"""An executor without a model: a fixed time per step and tokens that follow from the prompt.

No torch. For measuring the engine itself, and for tests that want real time and known tokens.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from trio_engine.core.plan import NO_TOKEN, ExecutorProperties, StepResult
from trio_engine.errors import RequestError
from trio_engine.executor.adapters import Adapters
from trio_engine.executor.grammar_draws import GrammarDraws
from trio_engine.executor.made_up_logprobs import MadeUpLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import DeviceCommand, StepPlan

VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 2048
# Small ids are special tokens in most vocabularies; none of them is ever drawn.
FIRST_TOKEN_ID = 1000
LAST_TOKEN_ID = VOCAB_SIZE - 1


def null_token(prompt_token_ids: Sequence[int], output_position: int) -> int:
    """The token that the null executor draws at an output position, counted from 0."""
    span = VOCAB_SIZE - FIRST_TOKEN_ID
    return FIRST_TOKEN_ID + (sum(prompt_token_ids) + output_position) % span


def modelless_properties(config: EngineConfig) -> ExecutorProperties:
    """What an executor without a model announces."""
    max_model_len = config.max_model_len or MAX_MODEL_LEN
    blocks_per_sequence = -(-max_model_len // config.block_size)
    return ExecutorProperties(
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks or config.max_num_seqs * blocks_per_sequence,
    )


def modelless_adapters(config: EngineConfig) -> Adapters:
    """The adapters of an executor without a model: counted, and nothing is read."""
    max_loras = config.max_loras if config.enable_lora else 0
    return Adapters(max_loras, load=lambda _: None, unload=lambda _: None)


class NullExecutor:
    """Takes ``config.null_step_ms`` for each plan and draws ``null_token``.

    Of the sampling options it looks at those for log probabilities, which are made up, and at
    grammars: there it draws the next token that is allowed. The masks are made within the step's
    time, as beside a device that computes meanwhile.
    Rows are columns of arrays, so that a step costs the same few microseconds for any batch. Of a
    batch that goes on decoding not even those are touched: each token is the one before it and 1.
    """

    launches_ahead = False

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._step_s = config.null_step_ms / 1000
        # By slot: tokens computed, tokens known, and the token that position 0 would have.
        self._num_computed = np.zeros(config.max_num_seqs, dtype=np.int64)
        self._num_known = np.zeros(config.max_num_seqs, dtype=np.int64)
        self._offsets = np.zeros(config.max_num_seqs, dtype=np.int64)
        # The last plan, its tokens if it decoded only, and the like plans since the arrays' state.
        self._last_plan: StepPlan | None = None
        self._last_tokens: list[int] | None = None
        self._num_repeats = 0
        self._logprobs = MadeUpLogprobs(VOCAB_SIZE)
        self._grammars = GrammarDraws(VOCAB_SIZE)
        self._adapters = modelless_adapters(config)
        self._plans: deque[StepPlan] = deque()

    def load(self) -> ExecutorProperties:
        """Nothing to load."""
        return modelless_properties(self._config)

    def launch(self, plan: StepPlan) -> None:
        """Notes the plan; all time passes in ``collect``.

        Raises:
            RequestStepError: there is no place for a row's adapter.
        """
        self._adapters.apply(plan)
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Takes the step's time, then gives its tokens."""
        plan = self._plans.popleft()
        end_s = time.monotonic() + self._step_s
        result = StepResult(plan_id=plan.plan_id, token_ids=self._step(plan))
        self._grammars.apply(plan)
        self._grammars.put_into(result, plan)
        self._logprobs.put_into(result, plan.slots)
        if self._step_s:
            time.sleep(max(0.0, end_s - time.monotonic()))
        return result

    def command(self, command: DeviceCommand) -> Any:
        """Sleeps and wakes up with nothing to give back; a dummy batch takes a step's time."""
        if self._adapters.can_do(command):
            return self._adapters.do(command)
        if command.method == "execute_dummy_batch":
            time.sleep(self._step_s)
        elif command.method not in ("sleep", "wake_up"):
            raise RequestError(f"the null executor has no method {command.method!r}")
        return None

    def shutdown(self) -> None:
        """Nothing to release."""

    def _step(self, plan: StepPlan) -> list[int]:
        last = self._last_tokens
        if last is not None and self._repeats(plan):
            self._num_repeats += 1
            tokens = [token + 1 if token < LAST_TOKEN_ID else FIRST_TOKEN_ID for token in last]
        else:
            self._catch_up()
            self._set_up_rows(plan)
            tokens = self._step_rows(plan)
        self._last_plan = plan
        has_decoded = max(plan.num_scheduled_tokens, default=0) == 1 and NO_TOKEN not in tokens
        self._last_tokens = tokens if has_decoded else None
        return tokens.copy()  # a grammar may change them

    def _repeats(self, plan: StepPlan) -> bool:
        """Whether the last plan is to be done again: the same rows, and one more token of each."""
        last = self._last_plan
        return (
            last is not None
            and plan.slots is last.slots
            and plan.num_scheduled_tokens is last.num_scheduled_tokens
            and not plan.new_rows
        )

    def _catch_up(self) -> None:
        if self._num_repeats:
            assert self._last_plan is not None
            slots = np.array(self._last_plan.slots, dtype=np.int64)
            self._num_computed[slots] += self._num_repeats
            self._num_known[slots] += self._num_repeats
            self._num_repeats = 0

    def _set_up_rows(self, plan: StepPlan) -> None:
        for row in plan.new_rows:
            self._num_computed[row.slot] = row.num_computed_tokens
            self._num_known[row.slot] = len(row.token_ids)
            prompt_sum = sum(row.token_ids[: row.num_prompt_tokens])
            self._offsets[row.slot] = prompt_sum - row.num_prompt_tokens
            self._logprobs.set_up(row)

    def _step_rows(self, plan: StepPlan) -> list[int]:
        slots = np.array(plan.slots, dtype=np.int64)
        computed = self._num_computed[slots] + np.array(plan.num_scheduled_tokens)
        self._num_computed[slots] = computed
        known = self._num_known[slots]
        samples = computed == known
        self._num_known[slots] = known + samples
        span = VOCAB_SIZE - FIRST_TOKEN_ID
        tokens = FIRST_TOKEN_ID + (self._offsets[slots] + known) % span
        token_ids: list[int] = np.where(samples, tokens, NO_TOKEN).tolist()
        return token_ids
