"""What every executor must do, as one call.

Public kit. Imports neither torch nor zmq nor pytest; hand it the factory of an executor of your
own, as ``tests/unit/executor/test_check_executor.py`` does for those of this package.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

from trio_engine.config import EngineConfig
from trio_engine.core.plan import NO_TOKEN, DeviceCommand, NewRow, StepPlan
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trio_engine.core.plan import StepResult
    from trio_engine.executor.base import Executor, ExecutorFactory
    from trio_engine.outputs import LogprobsLists, LogprobsTensors

LONG, SHORT = 0, 1
"""Slots of the two rows of a game."""

NUM_PROMPT_TOKENS = {LONG: 5, SHORT: 2}
CHUNK_TOKENS = 3
MAX_TOKENS = 6
NUM_LOGPROBS = 2

CONFIG = EngineConfig(max_num_seqs=2, max_model_len=32, block_size=4, num_blocks=16)
"""Limits that ``check_executor`` uses unless told otherwise."""


def check_executor(make_executor: ExecutorFactory, config: EngineConfig = CONFIG) -> None:
    """Checks an implementation of ``executor.base.Executor``, all on this thread.

    Plays one game of plans (a long prompt in two chunks, a short one beside it, then tokens of
    both) in a fresh executor, in the slots that the game left, after a ``reset``, after a command
    that was refused, and in another executor. The tokens must be the same each time.
    The long row asks for log probabilities: a row with each token, those of its prompt with the
    first.

    Args:
        make_executor: makes one without loading it. Called twice.
        config: with room for two rows of 11 tokens.

    Raises:
        AssertionError: what it did is not what the protocol says.
    """
    first = _Player(make_executor(config))
    tokens = first.play()
    assert first.play() == tokens, "a slot that is used again remembers its last row"
    assert first.play(reset=True) == tokens, "a reset leaves something of the rows"
    first.check_refusal()
    assert first.play() == tokens, "a refused command has changed something"
    first.executor.shutdown()
    second = _Player(make_executor(config))
    assert second.play() == tokens, "the same plans give other tokens in another executor"
    second.executor.shutdown()


class _Player:
    """Makes plans for one executor, and checks of each result what holds of any."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._properties = executor.load()
        self._check_properties()
        self._plan_ids = count()
        self._has_rows = False
        self._awaits_prompt_logprobs = False

    def play(self, *, reset: bool = False) -> dict[int, list[int]]:
        """The game; returns the tokens by slot. Its long row is left to the next game."""
        tokens: dict[int, list[int]] = {LONG: [], SHORT: []}
        left = [LONG] if self._has_rows and not reset else []
        start = self._plan(
            {LONG: CHUNK_TOKENS}, new_rows=[self._row(LONG)], finished_slots=left, reset=reset
        )
        self._has_rows = self._awaits_prompt_logprobs = True
        ((chunk,),) = self._run(start)
        assert chunk == NO_TOKEN, f"a chunk of a prompt gave token {chunk}"
        counts = {LONG: NUM_PROMPT_TOKENS[LONG] - CHUNK_TOKENS, SHORT: NUM_PROMPT_TOKENS[SHORT]}
        plans = [
            self._plan(counts, new_rows=[self._row(SHORT)]),
            self._plan({LONG: 1, SHORT: 1}),
            self._plan({SHORT: 1, LONG: 1}, new_block_ids=self._more_blocks(LONG)),
            self._plan({LONG: 1}, finished_slots=[SHORT]),
        ]
        for plan, token_ids in zip(plans, self._run(*plans), strict=True):
            for slot, token_id in zip(plan.slots, token_ids, strict=True):
                in_vocabulary = 0 <= token_id < self._properties.vocab_size
                assert in_vocabulary, f"plan {plan.plan_id} gave token {token_id}"
                tokens[slot].append(token_id)
        return tokens

    def check_refusal(self) -> None:
        """A command that no executor knows raises; what it raises is its own affair."""
        command = DeviceCommand(command_id=0, method="no such method")
        try:
            self.executor.command(command)
        except Exception:
            return
        raise AssertionError("an unknown command was not refused")

    def _check_properties(self) -> None:
        found = self._properties
        num_tokens = NUM_PROMPT_TOKENS[LONG] + MAX_TOKENS
        assert found.vocab_size > 1, found
        assert found.max_model_len >= num_tokens, found
        assert found.num_blocks >= 2 * self._num_blocks(num_tokens), found

    def _plan(self, counts: dict[int, int], **changes: Any) -> StepPlan:
        return StepPlan(
            plan_id=next(self._plan_ids),
            slots=list(counts),
            num_scheduled_tokens=list(counts.values()),
            **changes,
        )

    def _row(self, slot: int) -> NewRow:
        length = NUM_PROMPT_TOKENS[slot]
        return NewRow(
            slot=slot,
            request_id=f"row {slot}",
            token_ids=[
                (slot + position) % self._properties.vocab_size for position in range(length)
            ],
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=self._block_ids(slot)[: self._num_blocks(length + 2)],
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=MAX_TOKENS,
                logprobs=NUM_LOGPROBS if slot == LONG else None,
                prompt_logprobs=NUM_LOGPROBS if slot == LONG else None,
            ),
        )

    def _more_blocks(self, slot: int) -> list[tuple[int, list[int]]]:
        """Those of a row's blocks that ``_row`` left out."""
        more = self._block_ids(slot)[self._num_blocks(NUM_PROMPT_TOKENS[slot] + 2) :]
        return [(slot, more)] if more else []

    def _block_ids(self, slot: int) -> list[int]:
        # Not in rising order: an executor must go by the table.
        num_blocks = self._num_blocks(NUM_PROMPT_TOKENS[LONG] + MAX_TOKENS)
        return list(range(slot * num_blocks, (slot + 1) * num_blocks))[::-1]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._properties.block_size)

    def _run(self, *plans: StepPlan) -> list[list[int]]:
        """Launches and collects as an engine does; tokens by plan."""
        token_ids: list[list[int]] = []
        launched: deque[StepPlan] = deque()
        for plan in plans:
            if len(launched) == (2 if self.executor.launches_ahead else 1):
                token_ids.append(self._collect(launched.popleft()))
            self.executor.launch(plan)
            launched.append(plan)
        return token_ids + [self._collect(plan) for plan in launched]

    def _collect(self, plan: StepPlan) -> list[int]:
        result = self.executor.collect()
        assert result.plan_id == plan.plan_id, f"{result} came for plan {plan.plan_id}"
        assert len(result.token_ids) == len(plan.slots), f"{result} came for slots {plan.slots}"
        self._check_logprobs(plan, result)
        return result.token_ids

    def _check_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        counts = dict(zip(plan.slots, plan.num_scheduled_tokens, strict=True))
        due = [LONG] if counts.get(LONG, CHUNK_TOKENS) != CHUNK_TOKENS else []
        rows, prompts = result.logprobs or {}, result.prompt_logprobs or {}
        assert list(rows) == due, f"plan {plan.plan_id} has logprobs of slots {list(rows)}"
        due_prompts = due if self._awaits_prompt_logprobs else []
        assert list(prompts) == due_prompts, (
            f"plan {plan.plan_id} has prompt logprobs of slots {list(prompts)}"
        )
        if due:
            _check_row(rows[LONG], result.token_ids[list(plan.slots).index(LONG)])
        if due_prompts:
            self._awaits_prompt_logprobs = False
            _check_prompt(prompts[LONG], self._row(LONG).token_ids)


def _check_row(row: LogprobsLists, token_id: int) -> None:
    assert row.logprob_token_ids.shape == row.logprobs.shape == (1, NUM_LOGPROBS + 1), row
    assert row.sampled_token_ranks.shape == (1,), row
    assert row.logprob_token_ids[0, 0] == token_id, f"{row} came with token {token_id}"


def _check_prompt(tensors: LogprobsTensors, prompt: list[int]) -> None:
    shape = (len(prompt) - 1, NUM_LOGPROBS + 1)
    assert tensors.logprob_token_ids.shape == tensors.logprobs.shape == shape, tensors
    assert tensors.selected_token_ranks.shape == shape[:1], tensors
    ids = tensors.logprob_token_ids.to_numpy()[:, 0].tolist()
    assert ids == prompt[1:], f"prompt logprobs are about {ids}"
