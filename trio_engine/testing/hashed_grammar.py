"""A grammar in a few lines: which tokens may follow is a hash of all those before.

Public kit, without the library. A matcher that has lost, doubled or swapped a token allows others
from there on, so that a row that starts again wrongly is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.structured.matcher import WORD_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

SHARE = 4
"""One token in so many may follow."""


class HashedGrammar:
    """Ends after ``num_tokens`` tokens below ``vocab_size``.

    Args:
        vocab_size: tokens of the executor.
        num_tokens: of an output, the one that ends it not counted.
        fails_after: tokens after which none may follow, which is a failure.
    """

    def __init__(self, vocab_size: int, num_tokens: int, *, fails_after: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.num_tokens = num_tokens
        self.fails_after = fails_after

    def start(self, output_token_ids: Sequence[int], end_token_ids: Iterable[int]) -> HashedMatcher:
        """A matcher that has accepted the output so far."""
        matcher = HashedMatcher(self, frozenset(end_token_ids))
        for token_id in output_token_ids:
            matcher.accept(token_id)
        return matcher

    def may_follow(self, token_ids: Sequence[int]) -> set[int]:
        """The tokens after some; none after the last."""
        if len(token_ids) >= self.num_tokens:
            return set()
        everything = range(self.vocab_size)
        chosen = {t for t in everything if hash((*token_ids, t)) % SHARE == 0}
        return chosen or {hash(tuple(token_ids)) % self.vocab_size}

    def check(self, token_ids: Sequence[int], end_token_ids: Iterable[int]) -> None:
        """Raises AssertionError unless an output follows the grammar, as far as it goes."""
        for place, token_id in enumerate(token_ids):
            allowed = self.may_follow(token_ids[:place]) or set(end_token_ids)
            assert token_id in allowed, f"token {token_id} at place {place} of {token_ids}"


class HashedMatcher:
    """Follows one row. Made by ``HashedGrammar.start``."""

    def __init__(self, grammar: HashedGrammar, end_token_ids: frozenset[int]) -> None:
        self.is_over = False
        self.failure: str | None = None
        self.may_only_end = False
        self._grammar = grammar
        self._end_token_ids = end_token_ids
        self._token_ids: list[int] = []

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Writes which tokens may be next; all if it is over."""
        grammar = self._grammar
        if len(self._token_ids) == grammar.fails_after:
            self._fail("nothing may follow")
        allowed = grammar.may_follow(self._token_ids)
        self.may_only_end = not allowed
        words.fill(0)
        following = range(grammar.vocab_size) if self.is_over else allowed or self._end_token_ids
        for token_id in following:
            words[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)

    def accept(self, token_id: int) -> None:
        """Goes on by a token."""
        if self.is_over:
            return
        allowed = self._grammar.may_follow(self._token_ids)
        if token_id not in (allowed or self._end_token_ids):
            self._fail(f"token {token_id} may not follow {self._token_ids}")
            return
        self._token_ids.append(token_id)
        is_complete = len(self._token_ids) >= self._grammar.num_tokens
        self.is_over = not allowed or (is_complete and not self._end_token_ids)

    def _fail(self, why: str) -> None:
        self.is_over = True
        self.failure = why
