"""Grammars from their source, for one vocabulary. The only importer of llguidance.

Layer: structured. Compiling may take any time and any memory, and a hostile source can end the
process: ``trial`` finds out first. Why this library: ``docs/design/structured-output.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.errors import ModelError, RequestError
from trio_engine.structured.matcher import Matcher, explain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llguidance import LLMatcher

    from trio_engine.structured.vocabulary import Vocabulary

MAX_LEXER_STATES = 100_000
"""1-2 kB each, made as an output grows: 400 tokens of a bounded string make some 9,000."""

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{length}}}" for length in (2, 4, 8, 15, 30)),
    f"{_IN_STRING}+",
)
"""Sets of tokens that a mask takes or leaves as a whole: inside of JSON strings, with so many
characters to go. With the library's own three lengths masks there take half as long again."""

NOT_INSTALLED = "llguidance is not installed: pip install 'trio-engine[structured]'"


class Grammar:
    """A compiled grammar, for one request. Made by ``GrammarCompiler``.

    Two requests never share one, though their sources may be equal: what matchers have looked at
    is kept, up to ``MAX_LEXER_STATES``, and copies of one grammar have that in common.
    """

    def __init__(self, pristine: LLMatcher, vocab_size: int) -> None:
        self._pristine = pristine
        self._vocab_size = vocab_size

    def start(self, output_token_ids: Sequence[int], end_token_ids: Iterable[int]) -> Matcher:
        """A matcher that has accepted the output so far.

        Args:
            output_token_ids: of a row that starts again, else none.
            end_token_ids: tokens that end the request wherever the grammar may end. Without any,
                it ends by itself where nothing else can follow.
        """
        matcher = Matcher(self._pristine.deep_copy(), self._vocab_size, end_token_ids)
        for token_id in output_token_ids:
            matcher.accept(token_id)
        return matcher


class GrammarCompiler:
    """Compiles grammars for a vocabulary. Making one takes half a second for 49,000 tokens.

    Raises:
        ModelError: the library is missing, or cannot take the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ModelError(NOT_INSTALLED) from error
        self._library = llguidance
        self._vocab_size = len(vocabulary.tokens)
        tokens = _Tokens(vocabulary)
        try:
            wrapper = llguidance.TokenizerWrapper(tokens)
            self._tokenizer = llguidance.LLTokenizer(
                wrapper, eos_token=tokens.eos_token_id, slices=list(SLICES)
            )
        except ValueError as error:
            raise ModelError(f"the model's tokens do not suit grammars: {error}") from error
        # What a request asked for does not belong into error messages.
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )

    def compile(self, source: str) -> Grammar:
        """Compiles what ``grammar_source`` made. Other threads go on meanwhile.

        Raises:
            RequestError: it is no grammar, or too large a one.
        """
        pristine = self._library.LLMatcher(
            self._tokenizer, source, log_level=0, limits=self._limits
        )
        if pristine.is_error():
            raise RequestError(explain(pristine.get_error()))
        return Grammar(pristine, self._vocab_size)


class _Tokens:
    """What the library wants of a tokenizer.

    The token that ends a grammar is one more, behind the model's own: which of these end a
    request is the request's affair.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.tokens)
        self.bos_token_id = None
        self.tokens = [*vocabulary.tokens, b"<end>"]
        self.special_token_ids = [*vocabulary.special_token_ids, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens for text that a grammar forces: it asks once, to see what it may pass."""
        raise NotImplementedError("grammar_source switches this off")
