"""Log probabilities for executors without a model: made up, cheap, and the same each time.

No torch. Every token is the likeliest where it stands, and each id after it, counted round the
vocabulary, is less likely by ``STEP``. They add up to no probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.core.plan import NO_TOKEN
from trio_engine.outputs import LogprobsLists, LogprobsTensors
from trio_engine.sampling_params import logprobs_width
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trio_engine.core.plan import NewRow, StepResult
    from trio_engine.sampling_params import SamplingParams

STEP = 0.5


class MadeUpLogprobs:
    """What the rows of an executor ask for, by slot. Costs nothing if none asks.

    Args:
        vocab_size: of the executor.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._params: dict[int, SamplingParams] = {}
        self._prompts: dict[int, LogprobsTensors] = {}

    def set_up(self, row: NewRow) -> None:
        """Takes over what a new row asks; its slot's last row is forgotten."""
        params = row.sampling_params
        self._params.pop(row.slot, None)
        self._prompts.pop(row.slot, None)
        if params.num_logprobs is not None:
            self._params[row.slot] = params
        # With output it had them before it was preempted.
        if params.prompt_logprobs is not None and len(row.token_ids) == row.num_prompt_tokens:
            self._prompts[row.slot] = self._of_prompt(row.token_ids, params.prompt_logprobs)

    def put_into(self, result: StepResult, slots: Sequence[int]) -> None:
        """Adds to a result what those of its rows asked that got a token."""
        if not (self._params or self._prompts):
            return
        pairs = zip(slots, result.token_ids, strict=True)
        tokens = {slot: token_id for slot, token_id in pairs if token_id != NO_TOKEN}
        result.logprobs = {
            slot: self._of_token(self._params[slot], token_id)
            for slot, token_id in tokens.items()
            if slot in self._params
        }
        result.prompt_logprobs = {
            slot: self._prompts.pop(slot) for slot in tokens if slot in self._prompts
        }

    def _of_token(self, params: SamplingParams, token_id: int) -> LogprobsLists:
        if params.logprob_token_ids:
            ids = np.array([[token_id, *params.logprob_token_ids]], dtype=np.int32)
        else:
            ids = self._likeliest([token_id], params.num_logprobs or 0)
        return LogprobsLists(ids, self._logprobs(ids), np.ones(1, dtype=np.int64))

    def _of_prompt(self, token_ids: Sequence[int], num_logprobs: int) -> LogprobsTensors:
        ids = self._likeliest(token_ids[1:], num_logprobs)
        return LogprobsTensors(
            TensorData.from_numpy(ids),
            TensorData.from_numpy(self._logprobs(ids)),
            TensorData.from_numpy(np.ones(len(ids), dtype=np.int64)),
        )

    def _likeliest(self, token_ids: Sequence[int], num_logprobs: int) -> NDArray[np.int32]:
        first = np.array(token_ids, dtype=np.int32)[:, None]
        ranks = np.arange(logprobs_width(num_logprobs, self._vocab_size) - 1, dtype=np.int32)
        ids: NDArray[np.int32] = np.hstack([first, (first + ranks) % self._vocab_size])
        return ids

    def _logprobs(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        distances = (ids - ids[:, :1]) % self._vocab_size
        return np.float32(-STEP) * distances.astype(np.float32)
