"""What each token contributes to the output, as bytes.

Pure. Text decoders differ in spelling only (byte-level alphabet, ``▁`` for a space, ``<0x0A>``
for a byte); with that undone, decoding a stream is joining bytes and decoding UTF-8.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import tokenizers


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled at first use; ids outside the vocabulary give no bytes.

    Special tokens are spelled out: leaving them away is the caller's affair.

    Attributes:
        strips_leading_space: whether the first space of a whole text is not part of it. It is
            the space that SentencePiece puts before the first word when it encodes.

    Raises:
        ModelError: the tokenizer's decoder does more than spelling (WordPiece, CTC and such);
            names it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str) -> None:
        super().__init__()
        self._backend = backend
        self._vocab_size = vocabulary_end(backend)
        self._spelling = _Spelling()
        for step in _decoder_steps(backend):
            if not self._spelling.add(step):
                raise ModelError(f"{source}: decoder {json.dumps(step)} is not supported")
        self.strips_leading_space = self._spelling.strips_leading_space

    def __missing__(self, token_id: int) -> bytes:
        # Not kept: a peer's numbers would fill memory, and the backend takes 32 bits only.
        if not 0 <= token_id < self._vocab_size:
            return b""
        token = self._backend.id_to_token(token_id)
        data = b"" if token is None else self._spelling.undo(token)
        self[token_id] = data
        return data


def vocabulary_end(backend: tokenizers.Tokenizer) -> int:
    """The largest token id + 1. Ids may have gaps, so it is not their number."""
    return 1 + max(backend.get_vocab().values(), default=-1)


class _Spelling:
    """How one decoder, a chain of steps, spells the bytes of a token."""

    def __init__(self) -> None:
        self.strips_leading_space = False
        self._replacements: list[tuple[str, str]] = []
        self._prefix = ""
        self._byte_level: Mapping[str, int] | None = None
        self._byte_fallback = False
        self._fused = False

    def add(self, step: Mapping[str, Any]) -> bool:
        """Takes a step of the chain; False if it cannot be undone token by token."""
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = _byte_of_char()
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replacements.append((old, new))
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                self._fused = True
            # Before Fuse it would strip each token, not the text.
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if (
                self._fused
            ):
                self.strips_leading_space = start == 1
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                self._replacements.append((old, " "))
                self.strips_leading_space = scheme != "never"
            case {"type": "JoinBySpace"}:
                self._prefix = " "
                self.strips_leading_space = True
            case _:
                return False
        return True

    def undo(self, token: str) -> bytes:
        if self._byte_level is not None:
            return self._undo_byte_level(token, self._byte_level)
        if self._byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte
        for old, new in self._replacements:
            token = token.replace(old, new)
        return (self._prefix + token).encode()

    @staticmethod
    def _undo_byte_level(token: str, byte_of: Mapping[str, int]) -> bytes:
        # An added token may hold characters outside the alphabet; then all of it is plain text.
        try:
            return bytes([byte_of[char] for char in token])
        except KeyError:
            return token.encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> Iterable[dict[str, Any]]:
    if backend.decoder is None:
        return [{"type": "JoinBySpace"}]  # what the library does then; not one of its names
    # The pickling state is the decoder's part of tokenizer.json, without the vocabulary.
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def _fallback_byte(token: str) -> bytes | None:
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None
