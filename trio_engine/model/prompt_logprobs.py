"""Log probabilities of prompts, gathered chunk by chunk.

Layer: model. Every computed token of a prompt scores the one after it. The scores of a chunk are
as large as its tokens times the vocabulary, so they are made a slice at a time and not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trio_engine.errors import StepError
from trio_engine.model.device import to_device
from trio_engine.model.logprobs import TokenLogprobs, raw_logprobs, with_likeliest
from trio_engine.outputs import LogprobsTensors
from trio_engine.sampling_params import logprobs_width
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from trio_engine.core.plan import NewRow, StepPlan
    from trio_engine.model.batch import StepLayout
    from trio_engine.model.rows import Rows

# Positions scored at once: 50 MB of logits at a vocabulary of 49,152.
SLICE_TOKENS = 256


class PromptScores(NamedTuple):
    """What is known of one prompt: pieces on their way to the host, in order.

    Attributes:
        num_others: tokens to tell of beside the prompt's own.
        pieces: of the chunks so far.
    """

    num_others: int
    pieces: list[TokenLogprobs]

    def to_tensors(self) -> LogprobsTensors:
        """Joins the pieces, all of which have arrived."""
        width = self.num_others + 1
        token_ids = [piece.token_ids.numpy() for piece in self.pieces]
        logprobs = [piece.logprobs.numpy() for piece in self.pieces]
        ranks = [piece.ranks.numpy() for piece in self.pieces]
        # The empty ones are all that a prompt of one token has.
        return LogprobsTensors(
            TensorData.from_numpy(np.concatenate([np.empty((0, width), np.int32), *token_ids])),
            TensorData.from_numpy(np.concatenate([np.empty((0, width), np.float32), *logprobs])),
            TensorData.from_numpy(np.concatenate([np.empty(0, np.int64), *ranks])),
        )


class PromptLogprobs:
    """The rows whose prompts are asked for and not yet complete.

    Args:
        rows: the tokens.
        vocab_size: of the model.
        score: gives logits ``[n, vocab]`` of hidden states ``[n, hidden]``.
    """

    def __init__(self, rows: Rows, vocab_size: int, score: Callable[[Tensor], Tensor]) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._score = score
        self._prompts: dict[int, PromptScores] = {}

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's deltas.

        Raises:
            StepError: a row that asks for its prompt is not to compute all of it.
        """
        if plan.reset:
            self._prompts.clear()
        for slot in plan.finished_slots:
            self._prompts.pop(slot, None)
        for row in plan.new_rows:
            self._prompts.pop(row.slot, None)
            self._set_up(row)

    def _set_up(self, row: NewRow) -> None:
        num_logprobs = row.sampling_params.prompt_logprobs
        if num_logprobs is None or len(row.token_ids) > row.num_prompt_tokens:
            return  # with output it has had them
        if row.num_computed_tokens:
            raise StepError(f"row of {row.request_id} cannot tell its prompt's logprobs")
        width = logprobs_width(num_logprobs, self._vocab_size)
        self._prompts[row.slot] = PromptScores(width - 1, [])

    def add(self, layout: StepLayout, hidden: Tensor) -> None:
        """Scores the prompt tokens of a step; its rows are not yet said to be computed.

        Args:
            layout: of the step.
            hidden: ``[num_tokens, hidden]``, of the last layer.
        """
        if not self._prompts:
            return
        for index, slot in enumerate(layout.slots.tolist()):
            if slot in self._prompts:
                start = int(layout.starts[index])
                self._add_row(slot, hidden[start : start + int(layout.counts[index])])

    def take(self, slots: NDArray[np.int64]) -> dict[int, PromptScores]:
        """Those of rows, by slot, that get their first token now."""
        if not self._prompts:
            return {}
        return {slot: self._prompts.pop(slot) for slot in slots.tolist() if slot in self._prompts}

    def _add_row(self, slot: int, hidden: Tensor) -> None:
        prompt = self._prompts[slot]
        # The token at a position scores the one at the next; the prompt's last scores the output.
        first = int(self._rows.num_computed[slot]) + 1
        stop = min(first + hidden.shape[0], int(self._rows.num_prompt[slot]))
        targets = self._rows.token_ids[slot, first:stop].astype(np.int64)
        for start in range(0, targets.size, SLICE_TOKENS):
            some = targets[start : start + SLICE_TOKENS]
            logprobs = raw_logprobs(self._score(hidden[start : start + some.size]))
            found = with_likeliest(logprobs, to_device(some, hidden.device), prompt.num_others)
            prompt.pieces.append(found.to_host())
