"""An executor that fails on demand, and a preemption with a token in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.unit.core.core_parts import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    make_source,
    plan_step,
    run_step,
)
from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.errors import RequestStepError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.testing.core_driver import CoreDriver

if TYPE_CHECKING:
    from trio_engine.core.plan import StepPlan, StepResult

STOP_ID = 9


class PlantedExecutor(KVCheckingExecutor):
    """Fails plans for their first row, at launch, or at collect after the whole plan ran."""

    def __init__(
        self, config: EngineConfig, *, launches_ahead: bool, failures: dict[int, str]
    ) -> None:
        super().__init__(config, launches_ahead=launches_ahead, vocab_size=VOCAB_SIZE)
        self._failures = failures
        self._slots: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> None:
        self._slots[plan.plan_id] = plan.slots[0]
        self._fail(plan.plan_id, "launch")
        super().launch(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        self._fail(result.plan_id, "collect")
        return result

    def _fail(self, plan_id: int, moment: str) -> None:
        if self._failures.get(plan_id) == moment:
            raise RequestStepError(f"planted at {moment}", slots=[self._slots[plan_id]])


def make_planted_driver(
    failures: dict[int, str], *, launches_ahead: bool, depth: int = 2, **options: Any
) -> CoreDriver:
    config = EngineConfig(
        executor="kv-checking", max_model_len=MAX_MODEL_LEN, block_size=1, **options
    )
    executor = PlantedExecutor(config, launches_ahead=launches_ahead, failures=failures)
    core = EngineCore(config, executor.load(), num_clients=1, clock=lambda: 1.0)
    return CoreDriver(core, executor, pipeline_depth=depth)


def preempt_in_flight(core: EngineCore) -> tuple[StepPlan, StepPlan]:
    """Leaves "b" preempted with its second token in the first of two plans in flight."""
    core.add(make_source("a", 3, max_tokens=9))
    core.add(make_source("b", 2, max_tokens=9, stop_token_ids=[STOP_ID]))
    run_step(core, 40, 50)
    first, second = plan_step(core), plan_step(core)
    assert len(first.slots) == 2
    assert len(second.slots) == 1
    assert core.statistics().num_preemptions == 1
    return first, second
