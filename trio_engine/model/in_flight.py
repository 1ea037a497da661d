"""A launched step, until the host knows what it sampled.

Layer: model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trio_engine.core.plan import NO_TOKEN, StepPlan, StepResult
from trio_engine.model.logprobs import LogprobsGroup, lists_by_slot
from trio_engine.structured.rows import accept_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trio_engine.core.plan import RowMatcher
    from trio_engine.model.prompt_logprobs import PromptScores
    from trio_engine.model.rows import Rows
    from trio_engine.model.sampler import SampledTokens


class SampledOnHost:
    """Sampled tokens on their way to the host.

    Attributes:
        logprobs: of rows that asked, there when ``wait`` has returned.
        is_lost: as in ``SampledTokens``, there when ``wait`` has returned.
    """

    def __init__(self, sampled: SampledTokens) -> None:
        self.logprobs = [
            LogprobsGroup(group.indices, group.values.to_host()) for group in sampled.logprobs
        ]
        self._token_ids = sampled.token_ids.to("cpu", non_blocking=True)
        self._num_nans = sampled.num_nans
        self.is_lost = sampled.is_lost
        if sampled.is_lost is not None:
            self.is_lost = sampled.is_lost.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if sampled.num_nans is not None:
            self._num_nans = sampled.num_nans.to("cpu", non_blocking=True)
        if sampled.token_ids.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Tokens, and NaNs of each row or None."""
        if self._arrived is not None:
            self._arrived.synchronize()
        num_nans = None if self._num_nans is None else self._num_nans.numpy()
        return self._token_ids.numpy(), num_nans


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The rows of a step that sample, and which token of theirs it is.

    Attributes:
        plan_indices: ``[n]``: the rows' places in the plan.
        slots: ``[n]``.
        generations: ``[n]``: of the slots when the step was launched.
        positions: ``[n]``: of the token in its row.
        on_host: the tokens.
        prompts: by slot, of prompts that are complete.
        matchers: by place among these rows, of those that follow a grammar.
    """

    plan_indices: NDArray[np.int64]
    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    positions: NDArray[np.int64]
    on_host: SampledOnHost
    prompts: dict[int, PromptScores]
    matchers: dict[int, RowMatcher]


class StepInFlight:
    """A step that was launched.

    Args:
        plan: of the step.
        rows: get its tokens once they are known.
        sampled: None if no row samples.
    """

    def __init__(self, plan: StepPlan, rows: Rows, sampled: SampledRows | None) -> None:
        self._plan_id = plan.plan_id
        self._slots = plan.slots
        self._rows = rows
        self._sampled = sampled
        self._result: StepResult | None = None

    def settle(self) -> StepResult:
        """Waits for the device, tells the rows their tokens, and gives the result."""
        if self._result is None:
            self._result = self._settle()
        return self._result

    def _settle(self) -> StepResult:
        result = StepResult(plan_id=self._plan_id, token_ids=[NO_TOKEN] * len(self._slots))
        if self._sampled is None:
            return result
        rows = self._sampled
        values, nans = rows.on_host.wait()
        self._rows.settle(rows.slots, rows.generations, rows.positions, values)
        token_ids = np.array(result.token_ids)
        token_ids[rows.plan_indices] = values
        result.token_ids = token_ids.tolist()
        result.num_nans_in_logits = _nonzero(rows.slots, nans)
        if rows.on_host.logprobs:
            result.logprobs = lists_by_slot(rows.on_host.logprobs, rows.slots)
        if rows.matchers:
            is_lost = rows.on_host.is_lost
            result.grammar_ends = accept_tokens(
                rows.matchers,
                rows.slots.tolist(),
                values.tolist(),
                None if is_lost is None else is_lost.tolist(),
            )
        if rows.prompts:
            result.prompt_logprobs = {
                slot: prompt.to_tensors() for slot, prompt in rows.prompts.items()
            }
        return result


def _nonzero(slots: NDArray[np.int64], counts: NDArray[np.int64] | None) -> dict[int, int] | None:
    if counts is None or not counts.any():
        return None
    return {slot: n for slot, n in zip(slots.tolist(), counts.tolist(), strict=True) if n}
