"""Text from tokens that arrive a few at a time.

Pure. The library's ``DecodeStream`` and the usual window of re-decoded tokens both hold back what
ends in U+FFFD: on bytes that are no UTF-8 their window grows without end or they fail. Here
bytes go through one incremental UTF-8 decoder: each token is looked at once.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trio_engine.sampling_params import SamplingParams
    from trio_engine.text.tokenizer import Tokenizer

_MAX_UNFINISHED_BYTES = 3
"""A character has at most 4 bytes, so at most 3 can wait for the next token."""


class IncrementalDetokenizer:
    """The text that one request's output adds to its prompt.

    All pieces joined are ``decode(prompt + output)`` without ``decode(prompt)``: no half
    characters, bytes that are no UTF-8 become U+FFFD, and a first word keeps its leading space
    unless it opens the text. One difference: next to an invalid byte token (``<0xFF>``) the
    library gives up the valid characters of the same run of byte tokens too; here they stay.

    Args:
        tokenizer: of the model.
        prompt_token_ids: the context; only its last bytes are looked at.
        params: ``skip_special_tokens`` counts. ``spaces_between_special_tokens`` does not: no
            supported decoder puts spaces there.

    Counterpart: ``vllm/v1/engine/detokenizer.py``, ``FastIncrementalDetokenizer``.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids = (
            tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
        )
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        context = self._last_bytes(prompt_token_ids)
        self._utf8.decode(context)
        self._strips_space = tokenizer.token_bytes.strips_leading_space and not context

    def append(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that they complete."""
        return self._text_of(self._bytes_of(token_ids), final=False)

    def finish(self) -> str:
        """Returns what an unfinished last character comes to: U+FFFD, or nothing."""
        return self._text_of(b"", final=True)

    def _text_of(self, data: bytes, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if text and self._strips_space:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def _bytes_of(self, token_ids: Iterable[int]) -> bytes:
        table, skipped = self._token_bytes, self._skipped_ids
        return b"".join([table[token_id] for token_id in token_ids if token_id not in skipped])

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Enough of the end to know which bytes wait for more, and whether there is any text."""
        data = b""
        for token_id in reversed(token_ids):
            data = self._bytes_of((token_id,)) + data
            if len(data) >= _MAX_UNFINISHED_BYTES:
                break
        return data
