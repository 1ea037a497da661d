"""Sampling options of the running requests, as arrays by slot.

Layer: model. A step reads its rows' options with one index each.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from trio_engine.model.draw import seed_of_row

if TYPE_CHECKING:
    from trio_engine.sampling_params import SamplingParams


_FLOAT32 = np.finfo(np.float32)


class Asks(enum.IntFlag):
    """What a row asks for beside temperature and cuts; most rows ask for nothing here."""

    ALLOWED_IDS = 1
    BAD_WORDS = 2
    MIN_TOKENS = 4
    LOGIT_BIAS = 8
    PENALTIES = 16
    LOGPROBS = 32


class SamplingRows:
    """What sampling needs to know of each slot.

    Args:
        max_num_seqs: slots.
        vocab_size: of the model.

    Attributes:
        vocab_size: as given.
        asks: ``[max_num_seqs]`` uint8, flags of ``Asks``; 0 for slots without a row.
        temperature: ``[max_num_seqs]`` float32, 0 for greedy rows.
        min_p: ``[max_num_seqs]`` float32, 0 for none.
        top_k: ``[max_num_seqs]`` int64, the vocabulary's size for none.
        top_p: ``[max_num_seqs]`` float64, 1 for none.
        seed: ``[max_num_seqs]`` uint64.
        min_tokens: ``[max_num_seqs]`` int64.
        repetition_penalty: ``[max_num_seqs]`` float32, 1 for none.
        frequency_penalty: ``[max_num_seqs]`` float32, 0 for none.
        presence_penalty: ``[max_num_seqs]`` float32, 0 for none.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.asks = np.zeros(max_num_seqs, dtype=np.uint8)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.repetition_penalty = np.ones(max_num_seqs, dtype=np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, dtype=np.float32)

    def set_up(self, slot: int, params: SamplingParams) -> None:
        """Takes over a new row's options."""
        self.asks[slot] = _asks_of(params)
        self.temperature[slot] = params.temperature
        self.min_p[slot] = params.min_p
        self.top_k[slot] = min(params.top_k or self.vocab_size, self.vocab_size)
        self.top_p[slot] = params.top_p
        self.seed[slot] = seed_of_row(params.seed)
        # As many as there can be: the number that was asked for may not fit.
        self.min_tokens[slot] = min(params.min_tokens, np.iinfo(np.int64).max)
        # As float32 it must be neither 0 nor infinite: either makes NaN of a logit.
        self.repetition_penalty[slot] = np.clip(
            params.repetition_penalty, _FLOAT32.tiny, _FLOAT32.max
        )
        self.frequency_penalty[slot] = params.frequency_penalty
        self.presence_penalty[slot] = params.presence_penalty

    def drop(self, slot: int) -> None:
        """Forgets a row."""
        self.asks[slot] = 0


def _asks_of(params: SamplingParams) -> Asks:
    has_penalties = (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )
    asked = {
        Asks.ALLOWED_IDS: params.allowed_token_ids is not None,
        Asks.BAD_WORDS: bool(params.bad_words_token_ids),
        Asks.MIN_TOKENS: params.min_tokens > 0,
        Asks.LOGIT_BIAS: bool(params.logit_bias),
        Asks.PENALTIES: has_penalties,
        Asks.LOGPROBS: params.num_logprobs is not None,
    }
    return Asks(sum(flag for flag, is_asked in asked.items() if is_asked))
