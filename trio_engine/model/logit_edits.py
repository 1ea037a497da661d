"""What options do to logits before anything is drawn: masks, biases and penalties.

Layer: model. In vLLM's order: allowed ids, bad words, stop tokens before ``min_tokens``, biases,
penalties. Each touches only the rows that ask for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trio_engine.model.bad_words import BadWords
from trio_engine.model.device import to_device
from trio_engine.model.penalties import Penalties
from trio_engine.model.sampling_rows import Asks
from trio_engine.model.token_lists import TokenLists

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from torch import Tensor

    from trio_engine.core.plan import NewRow
    from trio_engine.model.rows import Rows
    from trio_engine.model.sampling_rows import SamplingRows
    from trio_engine.sampling_params import SamplingParams


class LogitEdits:
    """The options of rows that change logits.

    Args:
        options: by slot; they say which rows ask for what.
        rows: the tokens so far.
        device: of the logits.
    """

    def __init__(self, options: SamplingRows, rows: Rows, device: torch.device) -> None:
        self._options = options
        self._rows = rows
        self._allowed_ids = TokenLists(options.vocab_size, device)
        self._stop_ids = TokenLists(options.vocab_size, device)
        self._biases = TokenLists(options.vocab_size, device)
        self._bad_words = BadWords(rows, options.vocab_size, device)
        self._penalties = Penalties(options, device)

    def set_up(self, row: NewRow) -> None:
        """Takes over a new row's options; its slot is free."""
        params, slot = row.sampling_params, row.slot
        asks = self._options.asks[slot]
        if asks & Asks.ALLOWED_IDS:
            self._allowed_ids.put(slot, _with_zeros(params.allowed_token_ids or ()))
        if asks & Asks.BAD_WORDS:
            self._bad_words.put(slot, params.bad_words_token_ids or ())
        if asks & Asks.MIN_TOKENS:
            self._stop_ids.put(slot, _with_zeros(_stop_ids_of(params)))
        if asks & Asks.LOGIT_BIAS:
            self._biases.put(slot, (params.logit_bias or {}).items())
        if asks & Asks.PENALTIES:
            self._penalties.put(row)

    def drop(self, slot: int) -> None:
        """Forgets a row's options."""
        for part in (
            self._allowed_ids,
            self._bad_words,
            self._stop_ids,
            self._biases,
            self._penalties,
        ):
            part.drop(slot)

    def apply(
        self, logits: Tensor, slots: NDArray[np.int64], last_tokens: Tensor | None = None
    ) -> None:
        """Changes the logits of rows that ask for it, in place.

        Args:
            logits: ``[num_rows, vocab]`` float32, contiguous.
            slots: ``[num_rows]``.
            last_tokens: ``[max_num_seqs]``, on the device: the newest token of each row; None if
                the host knows them all.
        """
        asks = self._options.asks[slots]
        if (allowed := np.flatnonzero(asks & Asks.ALLOWED_IDS)).size:
            self._keep_allowed(logits, allowed, slots[allowed])
        if (bad := np.flatnonzero(asks & Asks.BAD_WORDS)).size:
            self._bad_words.apply(logits, bad, slots[bad], last_tokens)
        if (short := np.flatnonzero(asks & Asks.MIN_TOKENS)).size:
            self._mask_stop_ids(logits, short, slots)
        if (biased := np.flatnonzero(asks & Asks.LOGIT_BIAS)).size:
            places = self._biases.of(biased, slots[biased])
            logits.index_put_((places.rows, places.token_ids), places.values, accumulate=True)
        if (penalized := np.flatnonzero(asks & Asks.PENALTIES)).size:
            self._penalties.apply(logits, penalized, slots[penalized])

    def note(self, slots: NDArray[np.int64], token_ids: Tensor) -> None:
        """Takes note of the token that each of the rows got, ``[num_rows]`` int64."""
        penalized = np.flatnonzero(self._options.asks[slots] & Asks.PENALTIES)
        if penalized.size == slots.size:
            self._penalties.note(slots, token_ids)
        elif penalized.size:
            some = token_ids.index_select(0, to_device(penalized, token_ids.device))
            self._penalties.note(slots[penalized], some)

    def _keep_allowed(
        self, logits: Tensor, indices: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> None:
        places = self._allowed_ids.of(indices, slots)
        kept = logits[places.rows, places.token_ids]
        logits.index_fill_(0, to_device(indices, logits.device), -torch.inf)
        logits.index_put_((places.rows, places.token_ids), kept)

    def _mask_stop_ids(
        self, logits: Tensor, indices: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> None:
        is_short = self._rows.num_output(slots[indices]) < self._options.min_tokens[slots[indices]]
        if (indices := indices[is_short]).size:
            places = self._stop_ids.of(indices, slots[indices])
            masked = logits.new_full((), -torch.inf)
            logits.index_put_((places.rows, places.token_ids), masked)


def _with_zeros(token_ids: Iterable[int]) -> list[tuple[int, float]]:
    return [(token_id, 0.0) for token_id in token_ids]


def _stop_ids_of(params: SamplingParams) -> set[int]:
    eos = () if params.eos_token_id is None else (params.eos_token_id,)
    return params.all_stop_token_ids.union(eos)
