"""Builds a tokenizer from the metadata of a GGUF file.

Pure. Two families: byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``). Where
transformers' reader drops what the file says (the kind of word split, ``ignore_merges``,
``add_space_prefix``), the file is followed, as llama.cpp does.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from trio_engine.errors import ModelError
from trio_engine.gguf_metadata import read_gguf_metadata
from trio_engine.text.pre_tokenizers import WORD_SPLITS, WordSplit
from trio_engine.text.special_tokens import surround_with_special_tokens
from trio_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# End of turn and end of message: they end an output too, like the list in a generation config.
_MORE_EOS = ("eot_token_id", "eom_token_id")


class _TokenType(enum.IntEnum):
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer of a GGUF file.

    Raises:
        ModelError: the file is missing or damaged, or its tokenizer is of an unknown kind.
    """
    return build_gguf_tokenizer(read_gguf_metadata(path), str(path))


def build_gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Builds the tokenizer that GGUF metadata describe.

    Args:
        metadata: key to value, all keys of the file.
        source: the file's name, for messages.

    Raises:
        ModelError: a key is missing or contradicts another, or names an unknown kind.
    """
    return _Builder(metadata, source).build()


class _Builder:
    """One file's metadata on the way to a tokenizer."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self._source = source
        self._tokens = self._list("tokens", str)
        self._vocab = {token: index for index, token in enumerate(self._tokens)}
        self._special_tokens = {
            role: self._tokens[token_id]
            for role, key in _ROLES.items()
            if (token_id := self._token_id(key)) is not None
        }

    def build(self) -> Tokenizer:
        kind = self._get("model")
        if kind == "gpt2":
            backend, adds_bos = self._byte_level()
        elif kind == "llama":
            backend, adds_bos = self._sentencepiece(), True
        else:
            raise self._error(f"tokenizer.ggml.model {kind!r} is not supported")
        self._add_tokens(backend)
        surround_with_special_tokens(
            backend,
            self._special_tokens,
            add_bos=self._get("add_bos_token", adds_bos),
            add_eos=self._get("add_eos_token", False),
        )
        more_eos = [token_id for key in _MORE_EOS if (token_id := self._token_id(key)) is not None]
        return Tokenizer(
            backend,
            special_tokens=self._special_tokens,
            more_eos_token_ids=more_eos,
            chat_template=self._chat_template(),
            source=self._source,
        )

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        split = self._word_split()
        bpe = self._bpe(self._merges(), ignore_merges=split.ignores_merges)
        backend = tokenizers.Tokenizer(bpe)
        backend.pre_tokenizer = split.build()
        backend.decoder = decoders.ByteLevel()
        return backend, split.adds_bos

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        has_merges = self._get("merges") is not None
        merges = self._merges() if has_merges else self._merges_from_scores()
        backend = tokenizers.Tokenizer(self._bpe(merges, fuse_unk=True, byte_fallback=True))
        adds_space = self._get("add_space_prefix", True)
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="first" if adds_space else "never", split=False
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if adds_space:
            steps.append(decoders.Strip(" ", left=1))
        backend.decoder = decoders.Sequence(steps)
        return backend

    def _word_split(self) -> WordSplit:
        name = self._get("pre", "default")
        try:
            return WORD_SPLITS[name]
        except (KeyError, TypeError):
            raise self._error(f"tokenizer.ggml.pre {name!r} is not supported") from None

    def _bpe(self, merges: list[tuple[str, str]], **options: bool) -> models.BPE:
        try:
            return models.BPE(self._vocab, merges, **options)
        except Exception as error:  # the library raises nothing narrower
            raise self._error(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from None

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        for line in self._list("merges", str):
            left, _, right = line.partition(" ")
            if not left or not right or " " in right:
                raise self._error(f"tokenizer.ggml.merges has {line!r}, not a pair of tokens")
            merges.append((left, right))
        return merges

    def _merges_from_scores(self) -> list[tuple[str, str]]:
        """Every way to make a token of two tokens, best first; ties go to longer parts."""
        scores = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise self._error(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(self._tokens)} tokens"
            )
        score_of = dict(zip(self._tokens, scores, strict=True))
        pairs = [pair for token in score_of for pair in self._pairs_of(token)]
        return sorted(
            pairs, key=lambda pair: (-score_of[pair[0] + pair[1]], -len(pair[0]), -len(pair[1]))
        )

    def _pairs_of(self, token: str) -> Iterator[tuple[str, str]]:
        # No two ways to cut a token have equal lengths, so their order needs no care.
        for cut in range(1, len(token)):
            if token[:cut] in self._vocab and token[cut:] in self._vocab:
                yield token[:cut], token[cut:]

    def _add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        types = self._list("token_type", int) if self._get("token_type") is not None else []
        for token, kind in zip(self._tokens, types, strict=False):
            if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN):
                backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False)])
            elif kind == _TokenType.USER_DEFINED:
                backend.add_tokens([tokenizers.AddedToken(token, normalized=False)])
        # Older files mark nothing; what has a role is special all the same.
        backend.add_special_tokens(list(self._special_tokens.values()))

    def _chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        if template is None or isinstance(template, str):
            return template
        raise self._error(f"tokenizer.chat_template must be a str, got {template!r:.100}")

    def _token_id(self, key: str) -> int | None:
        token_id = self._get(key)
        if token_id is None or (type(token_id) is int and 0 <= token_id < len(self._tokens)):
            return token_id
        raise self._error(f"tokenizer.ggml.{key} {token_id!r} is not in the vocabulary")

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._get(key)
        if isinstance(values, list) and values and isinstance(values[0], kind):
            return values
        raise self._error(f"tokenizer.ggml.{key} is missing or not a list of {kind.__name__}")

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self._source}: {what}")
