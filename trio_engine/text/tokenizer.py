"""Text to token ids and back: one tokenizer, whichever kind of checkpoint it came with.

Pure. Reading the files is in ``folder_tokenizer`` and ``gguf_tokenizer``; text that arrives token
by token is decoded in ``detokenizer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.errors import RequestError
from trio_engine.text.token_bytes import TokenBytes, vocabulary_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import tokenizers

    from trio_engine.checkpoint import ModelFiles


class Tokenizer:
    """A model's tokenizer with what a client must know about its special tokens.

    Args:
        backend: does the work; owned by this object from now on.
        special_tokens: role to text (``bos_token``, ``eos_token``, ...), as chat templates see
            them. All are in the vocabulary.
        more_eos_token_ids: further ids that end an output, from the generation config.
        chat_template: Jinja source, if the model has one.
        source: where it came from, for messages.

    Attributes:
        special_tokens: as given.
        chat_template: as given.
        bos_token_id, eos_token_id: None where the model has none.
        eos_token_ids: every id that ends an output, ``eos_token_id`` first.
        special_token_ids: ids that ``skip_special_tokens`` leaves out of the text.
        vocab_size: the largest token id + 1. A model may have more rows, never used.
        token_bytes: what each token adds to the text, for streams.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        more_eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        source: str,
    ) -> None:
        # A tokenizer.json may carry the limits of its training; a prompt is never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._source = source
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.bos_token_id = self._id_of_role("bos_token")
        self.eos_token_id = self._id_of_role("eos_token")
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys((*eos, *more_eos_token_ids)))
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = vocabulary_end(backend)
        self.token_bytes = TokenBytes(backend, source)

    def __repr__(self) -> str:
        return f"<Tokenizer of {self._source}, {self.vocab_size} tokens>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes a text; the text of a special token in it becomes that token.

        Args:
            text: what to encode.
            add_special_tokens: put before and after what the model wants (BOS, EOS). A rendered
                chat template has them already.

        Raises:
            RequestError: the text has a lone surrogate, so it is no Unicode.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise RequestError(f"text must be valid Unicode, got {text!r:.100}") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _id_of_role(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Loads the tokenizer of a checkpoint; the tokenizer knows nothing of the weights.

    Raises:
        ModelError: a file is missing, damaged, or of a kind that is not supported; names it.
    """
    # Here and not above: both modules build a Tokenizer.
    if files.kind == "gguf":
        from trio_engine.text.gguf_tokenizer import read_gguf_tokenizer

        return read_gguf_tokenizer(files.path)
    from trio_engine.text.folder_tokenizer import read_folder_tokenizer

    return read_folder_tokenizer(files.path)
