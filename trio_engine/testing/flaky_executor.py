"""A ``KVCheckingExecutor`` some of whose plans fail, where and for which row a test says.

Public kit. Imports neither torch nor zmq nor pytest.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, TypeAlias

from trio_engine.errors import RequestStepError, StepError
from trio_engine.executor.kv_checking import KVCheckingExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import StepPlan, StepResult

FaultMoment: TypeAlias = Literal["launch", "collect"]


class FlakyExecutor(KVCheckingExecutor):
    """Fails on demand, before a plan has run (``launch``) or after all of it has (``collect``).

    Args:
        config: block and row limits.
        launches_ahead: which order of calls to ask of the engine.
        vocab_size: of the tokens drawn; None is that of all executors without a model.

    Attributes:
        num_faults: failures so far.
        next_faults: by moment, which row is at fault in the plan that comes there next; counted
            on from the first again where the plan has fewer.
        is_broken: whether every step fails, and by no row's fault.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        launches_ahead: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(config, launches_ahead=launches_ahead, vocab_size=vocab_size)
        self.num_faults = 0
        self.is_broken = False
        self.next_faults: dict[FaultMoment, int] = {}
        self._slots: deque[Sequence[int]] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Fails, or applies the plan at once.

        Raises:
            RequestStepError: as planted; nothing of the plan was applied.
            StepError: what the plan says contradicts the rows or the store, or it is broken.
        """
        self._fail("launch", plan.slots)
        super().launch(plan)
        self._slots.append(plan.slots)

    def collect(self) -> StepResult:
        """The oldest result, or its failure.

        Raises:
            RequestStepError: as planted; the rows have moved on all the same.
            StepError: it is broken.
        """
        result = super().collect()
        self._fail("collect", self._slots.popleft())
        return result

    def _fail(self, moment: FaultMoment, slots: Sequence[int]) -> None:
        if self.is_broken:
            raise StepError("this executor is broken")
        row = self.next_faults.pop(moment, None)
        if row is not None:
            self.num_faults += 1
            raise RequestStepError(f"planted at {moment}", slots=[slots[row % len(slots)]])
