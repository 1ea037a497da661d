"""What every executor must do with rows whose output follows a grammar, as one call.

Public kit, beside ``check_executor``. The grammar is a ``HashedGrammar``, so no library is needed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trio_engine.core.plan import NewRow, StepPlan
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.check_executor import CONFIG
from trio_engine.testing.hashed_grammar import HashedGrammar

if TYPE_CHECKING:
    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import StepResult
    from trio_engine.executor.base import Executor, ExecutorFactory

STRUCTURED, FREE = 0, 1
"""Slots of the two rows."""

PROMPT = [1, 2, 3]
NUM_TOKENS = 4
"""Of the grammar. A plan more is launched: it runs before its row is known to have ended."""


def check_grammar(make_executor: ExecutorFactory, config: EngineConfig = CONFIG) -> None:
    """Checks rows with a grammar: what they draw, what is told, and starting again.

    Args:
        make_executor: makes one without loading it. Called once.
        config: with room for two rows of 9 tokens.

    Raises:
        AssertionError: what it did is not what the protocol says.
    """
    executor = make_executor(config)
    player = _Player(executor)
    tokens = player.play([])
    again = player.play(tokens[:2])
    assert tokens[2:] == again, "a row that starts again draws other tokens"
    failed = player.play([], fails_after=1)
    assert failed == tokens[:1], "a row draws another first token if it fails after it"
    executor.shutdown()


class _Player:
    """Runs a structured row beside a free one, each time in the slots of the last two."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._properties = executor.load()
        self._next_plan_id = 0

    def play(self, output: list[int], *, fails_after: int | None = None) -> list[int]:
        """Starts the row after some output; returns what it drew up to its end."""
        grammar = HashedGrammar(self._properties.vocab_size, NUM_TOKENS, fails_after=fails_after)
        drawn: list[int] = []
        for result in self._run(self._plans(output, grammar)):
            ends = result.grammar_ends or {}
            assert set(ends) <= {STRUCTURED}, f"{result} ends a row without a grammar"
            why = ends.get(STRUCTURED)
            if len(output) + len(drawn) == fails_after:
                assert why is not None, f"{result} does not tell why nothing may follow"
                return drawn
            assert why is None, f"{result} fails a row that may go on"
            drawn.append(result.token_ids[0])
            grammar.check([*output, *drawn], ())
            is_complete = len(output) + len(drawn) == NUM_TOKENS
            assert (STRUCTURED in ends) == is_complete, f"{result} after {len(drawn)} tokens"
            if is_complete:
                return drawn
        raise AssertionError("the grammar did not end")

    def _plans(self, output: list[int], grammar: HashedGrammar) -> list[StepPlan]:
        token_ids = [*PROMPT, *output]
        rows = [self._row(STRUCTURED, token_ids, grammar), self._row(FREE, PROMPT, None)]
        counts = [len(token_ids), len(PROMPT)]
        plans = [self._plan(counts, new_rows=rows, reset=True)]
        num_more = NUM_TOKENS - len(output)
        return plans + [self._plan([1, 1]) for _ in range(num_more)]

    def _plan(
        self, counts: list[int], *, new_rows: list[NewRow] | None = None, reset: bool = False
    ) -> StepPlan:
        plan_id, self._next_plan_id = self._next_plan_id, self._next_plan_id + 1
        return StepPlan(
            plan_id=plan_id,
            slots=[STRUCTURED, FREE],
            num_scheduled_tokens=counts,
            new_rows=new_rows or [],
            reset=reset,
        )

    def _row(self, slot: int, token_ids: list[int], grammar: HashedGrammar | None) -> NewRow:
        # One token beyond the end of the grammar is drawn, for nothing.
        num_blocks = -(-(len(PROMPT) + NUM_TOKENS + 2) // self._properties.block_size)
        return NewRow(
            slot=slot,
            request_id=f"row {slot}",
            token_ids=token_ids,
            num_prompt_tokens=len(PROMPT),
            num_computed_tokens=0,
            block_ids=list(range(slot * num_blocks, (slot + 1) * num_blocks)),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS + 2),
            grammar=grammar,
        )

    def _run(self, plans: list[StepPlan]) -> list[StepResult]:
        """Launches and collects as an engine does."""
        results: list[StepResult] = []
        launched: deque[StepPlan] = deque()
        for plan in plans:
            if len(launched) == (2 if self._executor.launches_ahead else 1):
                launched.popleft()
                results.append(self._executor.collect())
            self._executor.launch(plan)
            launched.append(plan)
        return results + [self._executor.collect() for _ in launched]
