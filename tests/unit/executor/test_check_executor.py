"""The executors that run no model do what any must, and the check notices one that does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from trio_engine.core.plan import NO_TOKEN
from trio_engine.errors import StepError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.executor.null import NullExecutor
from trio_engine.testing.check_executor import CONFIG, check_executor
from trio_engine.testing.flaky_executor import FlakyExecutor
from trio_engine.testing.scripted_executor import ScriptedExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import DeviceCommand, StepPlan, StepResult


def test_the_null_executor_conforms() -> None:
    check_executor(NullExecutor)


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("executor", [KVCheckingExecutor, FlakyExecutor, ScriptedExecutor])
def test_an_executor_conforms_in_either_order(
    executor: type[KVCheckingExecutor] | type[ScriptedExecutor], launches_ahead: bool
) -> None:
    check_executor(lambda config: executor(config, launches_ahead=launches_ahead))


class Altered(NullExecutor):
    """A null executor whose results are changed on their way out."""

    num_made = 0

    def __init__(self, config: EngineConfig, alter: Callable[[StepResult, int], object]) -> None:
        super().__init__(config)
        self._alter = alter
        self._number = Altered.num_made
        Altered.num_made += 1

    def collect(self) -> StepResult:
        result = super().collect()
        drawn = result.token_ids
        self._alter(result, self._number)
        told = dict(zip(drawn, result.token_ids, strict=False))
        for row in (result.logprobs or {}).values():
            row.logprob_token_ids[0, 0] = told[int(row.logprob_token_ids[0, 0])]
        return result


def tell_chunks(result: StepResult, _number: int) -> None:
    result.token_ids = [7 if token == NO_TOKEN else token for token in result.token_ids]


def draw_by_plan(result: StepResult, _number: int) -> None:
    result.token_ids = [max(token - result.plan_id, NO_TOKEN) for token in result.token_ids]


def draw_by_executor(result: StepResult, number: int) -> None:
    result.token_ids = [max(token - number, NO_TOKEN) for token in result.token_ids]


def leave_the_vocabulary(result: StepResult, _number: int) -> None:
    result.token_ids = [token + 10**6 if token > 0 else token for token in result.token_ids]


def forget_the_plan(result: StepResult, _number: int) -> None:
    result.plan_id = 0


def lose_a_row(result: StepResult, _number: int) -> None:
    result.token_ids = result.token_ids[:1]


def lose_logprobs(result: StepResult, _number: int) -> None:
    result.logprobs = None


def tell_prompt_logprobs_late(result: StepResult, _number: int) -> None:
    result.prompt_logprobs = None


def cut_logprobs(result: StepResult, _number: int) -> None:
    for slot, row in (result.logprobs or {}).items():
        result.logprobs = {slot: row._replace(logprobs=row.logprobs[:, :1])}


@pytest.mark.parametrize(
    ("alter", "complaint"),
    [
        (tell_chunks, "a chunk of a prompt gave token 7"),
        (draw_by_plan, "remembers its last row"),
        (draw_by_executor, "other tokens in another executor"),
        (leave_the_vocabulary, "plan 1 gave token 100"),
        (forget_the_plan, "came for plan 1"),
        (lose_a_row, r"came for slots \[0, 1\]"),
        (lose_logprobs, r"plan 1 has logprobs of slots \[\]"),
        (tell_prompt_logprobs_late, r"plan 1 has prompt logprobs of slots \[\]"),
        (cut_logprobs, r"LogprobsLists\(logprob_token_ids"),
    ],
)
def test_results_that_do_not_conform_are_noticed(
    alter: Callable[[StepResult, int], object], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_executor(lambda config: Altered(config, alter))


def test_limits_without_room_for_the_check_are_noticed() -> None:
    with pytest.raises(AssertionError, match="num_blocks=1"):
        check_executor(NullExecutor, msgspec.structs.replace(CONFIG, num_blocks=1))


class KnowsEveryCommand(NullExecutor):
    def command(self, command: DeviceCommand) -> Any:
        return None


def test_an_executor_that_knows_every_command_is_noticed() -> None:
    with pytest.raises(AssertionError, match="an unknown command was not refused"):
        check_executor(KnowsEveryCommand)


class KeepsRows(KVCheckingExecutor):
    def launch(self, plan: StepPlan) -> None:
        plan.reset = False
        super().launch(plan)


def test_an_error_of_the_executor_comes_out_as_it_is() -> None:
    with pytest.raises(StepError, match="sets up slot 0 over a live row"):
        check_executor(KeepsRows)
