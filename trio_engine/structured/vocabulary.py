"""The tokens that grammars speak of: what each adds to the output, and which add nothing.

Layer: structured. A grammar describes bytes and a sampler draws tokens; this is what lies between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from trio_engine.text.tokenizer import Tokenizer

NUM_BYTE_TOKENS = 257


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Every token of a model, as bytes.

    Attributes:
        tokens: by id, one for each id that the model samples from; empty for an id without a token.
        special_token_ids: tokens that stand for no text, whatever ``tokens`` spells for them. Only
            a structural tag can ask for one.
    """

    tokens: list[bytes]
    special_token_ids: list[int]

    def special_token_id(self, text: str) -> int | None:
        """The special token that is spelled like this, if there is one."""
        data = text.encode()
        return next((i for i in self.special_token_ids if self.tokens[i] == data), None)


def byte_vocabulary(vocab_size: int) -> Vocabulary:
    """A vocabulary for executors without a model: id ``b + 1`` is the byte ``b``.

    Id 0 is a special token, and ids from 257 on are nothing.

    Raises:
        ModelError: ``vocab_size`` is below 257.
    """
    if vocab_size < NUM_BYTE_TOKENS:
        raise ModelError(
            f"a vocabulary of bytes has {NUM_BYTE_TOKENS} tokens, the executor has {vocab_size}"
        )
    nothing = [b""] * (vocab_size - NUM_BYTE_TOKENS)
    tokens = [b"<end>", *(bytes([byte]) for byte in range(256)), *nothing]
    return Vocabulary(tokens=tokens, special_token_ids=[0])


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """The vocabulary of a model with this tokenizer and so many rows."""
    num_tokens = min(tokenizer.vocab_size, vocab_size)
    special = {*tokenizer.special_token_ids, *tokenizer.eos_token_ids}
    return Vocabulary(
        tokens=[tokenizer.token_bytes[token_id] for token_id in range(num_tokens)]
        + [b""] * (vocab_size - num_tokens),
        special_token_ids=sorted(token_id for token_id in special if token_id < num_tokens),
    )


def load_vocabulary(model: str | None, vocab_size: int) -> Vocabulary:
    """Loads the vocabulary that an executor names. Takes seconds: not for a loop's thread.

    Args:
        model: whose tokenizer, as in ``EngineConfig.model``; None for ``byte_vocabulary``.
        vocab_size: ids that the executor samples from.

    Raises:
        ModelError: there is no such model, or its tokenizer cannot be read; names it.
    """
    if model is None:
        return byte_vocabulary(vocab_size)
    # Here: an engine that is never asked for structured output needs no tokenizer.
    from trio_engine.checkpoint import locate_model
    from trio_engine.text.tokenizer import load_tokenizer

    return vocabulary_of(load_tokenizer(locate_model(model)), vocab_size)
