"""Log probabilities between a step's result and a client: checked, kept unsent, joined at the end.

Pure. How wide a row is, ``sampling_params.logprobs_width`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.errors import StepError
from trio_engine.outputs import LogprobsLists
from trio_engine.sampling_params import logprobs_width

if TYPE_CHECKING:
    from trio_engine.core.outbox import Outbox
    from trio_engine.core.plan import StepResult
    from trio_engine.core.request import Request
    from trio_engine.outputs import LogprobsTensors

# Three small array objects. Measured with CPython 3.11 and numpy 2.
ROW_OVERHEAD_BYTES = 500


class UnsentLogprobs:
    """What one unsent entry will tell: rows as they came, and those of the prompt.

    Attributes:
        num_bytes: what they hold in memory.
        prompt: whole, of the first token's entry.
    """

    __slots__ = ("_rows", "num_bytes", "prompt")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.prompt: LogprobsTensors | None = None
        self._rows: list[LogprobsLists] = []

    def append(self, rows: LogprobsLists) -> None:
        """Adds the row of one more token; all are of one width."""
        self._rows.append(rows)
        self.num_bytes += ROW_OVERHEAD_BYTES + sum(array.nbytes for array in rows[:3])

    def put_prompt(self, tensors: LogprobsTensors) -> None:
        """Adds those of the prompt; only the first ones stay."""
        if self.prompt is None:
            self.prompt = tensors
            self.num_bytes += sum(tensor.data.nbytes for tensor in tensors[:3])

    def joined(self) -> LogprobsLists | None:
        """All rows in order; None if there are none."""
        if len(self._rows) <= 1:
            return self._rows[0] if self._rows else None
        ids, logprobs, ranks, _ = zip(*self._rows, strict=True)
        return LogprobsLists(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks))


def put_details(
    outbox: Outbox, request: Request, slot: int, result: StepResult, vocab_size: int
) -> None:
    """Hands on what a result tells beside the token that a request gets next; nothing unasked.

    Raises:
        StepError: log probabilities that were asked for are missing, or of another shape.
    """
    params = request.sampling_params
    if params.num_logprobs is not None:
        rows = (result.logprobs or {}).get(slot)
        shape = (1, logprobs_width(params.num_logprobs, vocab_size))
        if rows is None or rows.logprobs.shape != shape:
            raise StepError(f"plan {result.plan_id} lacks logprobs {shape} of {request!r}")
        outbox.append_logprobs(request, rows)
    if params.prompt_logprobs is not None and request.needs_whole_prompt:
        tensors = (result.prompt_logprobs or {}).get(slot)
        shape = (request.num_prompt_tokens - 1, logprobs_width(params.prompt_logprobs, vocab_size))
        if tensors is None or tensors.logprobs.shape != shape:
            raise StepError(f"plan {result.plan_id} lacks prompt logprobs {shape} of {request!r}")
        outbox.put_prompt_logprobs(request, tensors)
    outbox.put_num_nans(request, (result.num_nans_in_logits or {}).get(slot, 0))
