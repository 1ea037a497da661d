"""How far the output of a row has come in its grammar, and which tokens may follow.

Layer: structured. Row state of an executor: used by the forward thread alone, in the order
``fill``, sample, ``accept``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from trio_engine.errors import brief

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llguidance import LLMatcher
    from numpy.typing import NDArray

MAX_MASK_S = 0.5
"""Of a core's time, for one mask: all other rows wait. Honest grammars take a thousandth of it."""

WORD_BITS = 32
_ALL = np.uint32(0xFFFFFFFF)


def num_mask_words(vocab_size: int) -> int:
    """Length of a mask: bit ``i % 32`` of word ``i // 32`` says whether token i may be next.

    There is room for one bit more than tokens, by which the library says that the grammar may end.
    """
    return vocab_size // WORD_BITS + 1


class Matcher:
    """Follows the output of one row. Made by ``Grammar.start``.

    Args:
        library: the library's matcher, at the start of the grammar.
        vocab_size: tokens of the model.
        end_token_ids: tokens that end the request wherever the grammar may end.

    Attributes:
        is_over: whether nothing may follow any more.
        failure: why, unless it is because the grammar has ended.
        may_only_end: whether the mask filled last allows end tokens and nothing else.
    """

    def __init__(self, library: LLMatcher, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self.is_over = False
        self.failure: str | None = None
        self.may_only_end = False
        self._library = library
        self._num_words = num_mask_words(vocab_size)
        self._library_end_bit = np.uint32(1 << vocab_size % WORD_BITS)
        self._end_token_ids = frozenset(end_token_ids)
        # The next mask, where it was needed to see whether anything can follow.
        self._ahead: NDArray[np.uint32] | None = None

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Writes which tokens may be next.

        A row that is over allows all: it is computed for nothing, and sampling must have
        something to take.

        Args:
            words: ``[num_mask_words]``, contiguous.
        """
        if self._ahead is not None:
            words[:], self._ahead = self._ahead, None
        elif not self.is_over and not self._compute(words):
            self._fail("the grammar allows no token")
        if self.is_over:
            words.fill(_ALL)

    def accept(self, token_id: int) -> None:
        """Goes on by a token that was sampled."""
        if self.is_over:
            return
        self._ahead = None
        if token_id in self._end_token_ids and self._may_end_with(token_id):
            self.is_over = True
        elif not self._library.consume_token(token_id):
            self._fail(f"the grammar does not allow token {token_id}, which was sampled")
        elif not self._end_token_ids and self._library.is_accepting():
            self._end_if_complete()

    def _may_end_with(self, token_id: int) -> bool:
        """Whether an end token ends the grammar here and is not part of it."""
        return self._library.is_accepting() and not self._library.validate_tokens([token_id])

    def _end_if_complete(self) -> None:
        ahead = np.empty(self._num_words, dtype=np.uint32)
        if self._compute(ahead):
            self._ahead = ahead
        else:
            self.is_over = True

    def _compute(self, words: NDArray[np.uint32]) -> bool:
        """Fills a mask or fails; False if nothing may follow."""
        started_s = time.thread_time()
        self._library.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._library.is_error():
            self._fail(explain(self._library.get_error()))
        elif time.thread_time() - started_s > MAX_MASK_S:
            self._fail(f"finding the tokens that may follow takes more than {MAX_MASK_S} s")
        else:
            self._replace_end(words)
            return bool(words.any())
        return True

    def _replace_end(self, words: NDArray[np.uint32]) -> None:
        """Puts the row's end tokens in the place of the library's."""
        may_end = bool(words[-1] & self._library_end_bit)
        words[-1] &= ~self._library_end_bit
        self.may_only_end = may_end and not words.any()
        for token_id in self._end_token_ids if may_end else ():
            words[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)

    def _fail(self, why: str) -> None:
        self.is_over = True
        self.failure = why


def explain(error: str) -> str:
    """An error of the library as a client should read it."""
    text = error.partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        return "the grammar cannot be fulfilled: no token may follow"
    return brief(text)
