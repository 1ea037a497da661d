"""A tokenizer whose tokens are whatever bytes a test wants, also parts of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import tokenizers

from trio_engine.text.token_bytes import _byte_of_char
from trio_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable


class PieceTokenizer(NamedTuple):
    """The tokenizer, and the token that adds so many bytes to an output."""

    tokenizer: Tokenizer
    token_of: dict[bytes, int]


def make_piece_tokenizer(pieces: Iterable[bytes]) -> PieceTokenizer:
    """Each piece is one token. There are no special tokens."""
    char_of = {byte: char for char, byte in _byte_of_char().items()}
    token_of = {piece: token_id for token_id, piece in enumerate(sorted(set(pieces)))}
    vocabulary = {
        "".join(char_of[byte] for byte in piece): token_id for piece, token_id in token_of.items()
    }
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return PieceTokenizer(Tokenizer(backend, special_tokens={}, source="pieces"), token_of)


def cut_in_two(data: bytes) -> list[tuple[bytes, bytes]]:
    """At every place between two bytes."""
    return [(data[:place], data[place:]) for place in range(1, len(data))]
