"""The steps that were planned and have not settled, and what comes back for them.

Pure. Whatever does not fit the oldest of them means that the executor is broken: results and
failures come strictly in order (rule 1).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trio_engine.errors import StepError

if TYPE_CHECKING:
    from trio_engine.core.plan import StepResult
    from trio_engine.core.request import Request
    from trio_engine.core.scheduled_step import ScheduledStep
    from trio_engine.errors import RequestStepError


class StepsInFlight:
    """At most two steps, oldest first."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[ScheduledStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest_requests(self) -> list[Request]:
        """Whose rows are in the oldest step; of no step, none."""
        return self._steps[0].requests if self._steps else []

    def add(self, step: ScheduledStep) -> None:
        """A step is on its way, behind all others."""
        self._steps.append(step)

    def settle(self, result: StepResult) -> ScheduledStep:
        """Takes out the step of a result.

        Raises:
            StepError: it is not of the oldest step, or has not as many rows.
        """
        if not self._steps or self._steps[0].plan.plan_id != result.plan_id:
            raise StepError(f"result of plan {result.plan_id} out of turn")
        num_rows = len(self._steps[0].requests)
        if len(result.token_ids) != num_rows:
            raise StepError(
                f"plan {result.plan_id} has {num_rows} rows, its result {len(result.token_ids)}"
            )
        return self._steps.popleft()

    def fail(
        self, plan_id: int, error: RequestStepError
    ) -> tuple[list[ScheduledStep], list[Request]]:
        """Takes out all steps, as none behind a failed one counts.

        Returns:
            The steps, and whose rows are at fault.

        Raises:
            StepError: it is not of the oldest step, or names none of its rows.
        """
        if not self._steps or self._steps[0].plan.plan_id != plan_id:
            raise StepError(f"failure of plan {plan_id} out of turn") from error
        step, slots = self._steps[0], set(error.slots)
        rows = dict(zip(step.plan.slots, step.requests, strict=True))
        if not slots or not slots <= rows.keys():
            raise StepError(f"plan {plan_id} failed for slots {error.slots}") from error
        steps, self._steps = list(self._steps), deque()
        return steps, [rows[slot] for slot in slots]
