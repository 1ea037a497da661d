"""Grammars over the vocabulary of bytes, in which a text is its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trio_engine.sampling_params import StructuredOutputsParams
from trio_engine.structured.compiler import Grammar, GrammarCompiler
from trio_engine.structured.matcher import num_mask_words
from trio_engine.structured.source import grammar_source
from trio_engine.structured.vocabulary import byte_vocabulary

if TYPE_CHECKING:
    from trio_engine.structured.matcher import Matcher

VOCAB_SIZE = 300
END = 0
MAX_BYTES = 1 << 20
VOCABULARY = byte_vocabulary(VOCAB_SIZE)
COMPILER = GrammarCompiler(VOCABULARY)


def source_of(**fields: Any) -> str:
    return grammar_source(StructuredOutputsParams(**fields), VOCABULARY, MAX_BYTES)


def compile_grammar(**fields: Any) -> Grammar:
    return COMPILER.compile(source_of(**fields))


def start(*, ends: tuple[int, ...] = (END,), output: str = "", **fields: Any) -> Matcher:
    return compile_grammar(**fields).start(tokens_of(output), ends)


def tokens_of(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def allowed(matcher: Matcher) -> set[int]:
    """The tokens that may be next."""
    words = np.zeros(num_mask_words(VOCAB_SIZE), dtype=np.uint32)
    matcher.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


def allowed_text(matcher: Matcher) -> str:
    """The same, as the characters they stand for, without end tokens."""
    return "".join(sorted(chr(token - 1) for token in allowed(matcher) if 0 < token <= 256))


def accepts(text: str, **fields: Any) -> bool:
    """Whether a text is all of an output: each token was allowed, and then the end."""
    return follows(compile_grammar(**fields), text)


def follows(grammar: Grammar, text: str) -> bool:
    matcher = grammar.start([], [END])
    for token in tokens_of(text):
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return END in allowed(matcher) and not matcher.is_over
