"""Sampling options of the running requests, as arrays by slot.

Layer: model. A step reads its rows' options with one index each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.model.draw import seed_of_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trio_engine.sampling_params import SamplingParams


class SamplingRows:
    """What sampling needs to know of each slot.

    Args:
        max_num_seqs: slots.
        vocab_size: token ids at or above it are ignored.

    Attributes:
        temperature: ``[max_num_seqs]`` float32, 0 for greedy rows.
        min_p: ``[max_num_seqs]`` float32, 0 for none.
        top_k: ``[max_num_seqs]`` int64, the vocabulary's size for none.
        top_p: ``[max_num_seqs]`` float64, 1 for none.
        seed: ``[max_num_seqs]`` uint64.
        min_tokens: ``[max_num_seqs]`` int64.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._stop_ids: dict[int, NDArray[np.int64]] = {}

    def set_up(self, slot: int, params: SamplingParams) -> None:
        """Takes over a new row's options."""
        self.temperature[slot] = params.temperature
        self.min_p[slot] = params.min_p
        self.top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self.top_p[slot] = params.top_p
        self.seed[slot] = seed_of_row(params.seed)
        self.min_tokens[slot] = params.min_tokens
        if params.min_tokens:
            self._stop_ids[slot] = self._stop_ids_of(params)

    def stop_ids(self, slot: int) -> NDArray[np.int64]:
        """Tokens that a row with ``min_tokens`` must not sample before."""
        return self._stop_ids[slot]

    def _stop_ids_of(self, params: SamplingParams) -> NDArray[np.int64]:
        ids = set(params.all_stop_token_ids)
        if params.eos_token_id is not None:
            ids.add(params.eos_token_id)
        # An id outside the vocabulary would land in another row, or from the row's end.
        known = sorted(token_id for token_id in ids if 0 <= token_id < self._vocab_size)
        return np.array(known, dtype=np.int64)
