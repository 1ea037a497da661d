"""Masks of rows whose output follows a grammar, put on their logits.

Layer: model. The matchers are row state here, so that such rows stay in the pipeline (rule 8): the
host finds their masks while the device computes the step whose logits they are for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trio_engine.model.device import to_device
from trio_engine.structured.matcher import WORD_BITS
from trio_engine.structured.rows import GrammarRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trio_engine.core.plan import RowMatcher, StepPlan
    from trio_engine.model.in_flight import StepInFlight
    from trio_engine.model.sampling_rows import SamplingRows


class GrammarMasks:
    """Which rows follow a grammar, and their masks. A step without them costs nothing.

    Args:
        options: of the rows.
        device: of the logits.
    """

    def __init__(self, options: SamplingRows, device: torch.device) -> None:
        self._options = options
        self._device = device
        self._rows = GrammarRows(options.vocab_size)
        self._last_step: StepInFlight | None = None

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's changes of rows."""
        if plan.reset:
            self._last_step = None
        self._rows.apply(plan)

    def mask(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> dict[int, RowMatcher]:
        """Leaves each row only what may follow by its grammar.

        Args:
            logits: ``[num_rows, vocab]`` float32; changed.
            slots: ``[num_rows]``: the rows' places.

        Returns:
            The matchers by their row's place; they wait for the tokens that are sampled now.
        """
        matchers = self._rows.matchers_of(slots.tolist())
        if not matchers:
            return {}
        if self._last_step is not None:
            self._last_step.settle()  # its tokens say where the matchers stand
        masks = self._rows.masks_of(matchers.values(), len(matchers))
        for place, matcher in matchers.items():
            if matcher.may_only_end:
                # The end of a grammar comes also before ``min_tokens``: nothing else is left.
                self._options.min_tokens[slots[place]] = 0
        self._put(logits, np.fromiter(matchers, dtype=np.int64), masks)
        return matchers

    def note_step(self, step: StepInFlight) -> None:
        """A step was launched whose tokens the next masks depend on."""
        self._last_step = step

    def _put(
        self, logits: torch.Tensor, places: NDArray[np.int64], masks: NDArray[np.uint32]
    ) -> None:
        words = to_device(masks.view(np.int32), self._device)
        bits = torch.arange(WORD_BITS, dtype=torch.int32, device=self._device)
        is_forbidden = ((words[:, :, None] >> bits) & 1 == 0).flatten(1)[:, : logits.shape[1]]
        if len(places) == len(logits):
            logits.masked_fill_(is_forbidden, -torch.inf)
            return
        indices = to_device(places, self._device)
        some = logits.index_select(0, indices).masked_fill_(is_forbidden, -torch.inf)
        logits.index_copy_(0, indices, some)
