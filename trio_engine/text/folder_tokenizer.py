"""Reads the tokenizer of a Hugging Face folder.

Pure. ``tokenizer.json`` does the work; the files around it say which tokens are special, what
ends an output, and how a chat is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
import tokenizers

from trio_engine.errors import ModelError
from trio_engine.text.special_tokens import surround_with_special_tokens
from trio_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

T = TypeVar("T")

_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class _Token(msgspec.Struct):
    """A token as newer files write it; older ones give its text alone."""

    content: str
    special: bool = False


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """What is read of ``tokenizer_config.json`` and ``special_tokens_map.json``."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    additional_special_tokens: list[str | _Token] | None = None
    # By name in newer files: {"image_token": "<image>"}.
    extra_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None
    added_tokens_decoder: dict[int, _Token] = {}
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None

    def special_token(self, role: str) -> str | None:
        return _text_of(getattr(self, role))

    def more_special_tokens(self) -> list[str]:
        extra = self.extra_special_tokens or []
        entries = [*(extra.values() if isinstance(extra, dict) else extra)]
        entries += self.additional_special_tokens or []
        return [text for entry in entries if (text := _text_of(entry))]


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _ChatTemplateFile(msgspec.Struct):
    chat_template: str | None = None


def read_folder_tokenizer(folder: Path) -> Tokenizer:
    """Reads a folder's tokenizer. Only ``tokenizer.json`` is required.

    Raises:
        ModelError: a file is missing or damaged; names it.
    """
    backend = _read_backend(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json", _TokenizerConfig)
    _add_tokens(backend, config, folder)
    special_tokens = _special_tokens(config, folder)
    backend.add_special_tokens([*special_tokens.values(), *config.more_special_tokens()])
    if config.add_bos_token is not None or config.add_eos_token is not None:
        surround_with_special_tokens(
            backend,
            special_tokens,
            add_bos=bool(config.add_bos_token),
            add_eos=bool(config.add_eos_token),
        )
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        more_eos_token_ids=_eos_token_ids(folder),
        chat_template=_read_chat_template(folder, config),
        source=str(folder),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file; other tokenizer formats are not read")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: {error}") from None


def _add_tokens(backend: tokenizers.Tokenizer, config: _TokenizerConfig, folder: Path) -> None:
    """Adds what only ``tokenizer_config.json`` or ``added_tokens.json`` lists, where it says."""
    ids = _read_json(folder / "added_tokens.json", dict[str, int])
    ids |= {token.content: token_id for token_id, token in config.added_tokens_decoder.items()}
    missing = [text for text in ids if backend.token_to_id(text) is None]
    backend.add_tokens(sorted(missing, key=lambda text: ids[text]))
    for text in missing:
        if backend.token_to_id(text) != ids[text]:
            raise ModelError(
                f"{folder}: the added token {text!r} cannot have the id {ids[text]}: "
                "ids before it are missing"
            )
    special = [token.content for token in config.added_tokens_decoder.values() if token.special]
    backend.add_special_tokens(special)


def _special_tokens(config: _TokenizerConfig, folder: Path) -> dict[str, str]:
    older = _read_json(folder / "special_tokens_map.json", _TokenizerConfig)
    texts = {role: config.special_token(role) or older.special_token(role) for role in _ROLES}
    return {role: text for role, text in texts.items() if text}


def _text_of(token: str | _Token | None) -> str | None:
    return token.content if isinstance(token, _Token) else token


def _eos_token_ids(folder: Path) -> Iterable[int]:
    path = folder / "generation_config.json"
    # Without one, generation follows the model's configuration.
    eos = _read_json(path if path.is_file() else folder / "config.json", _GenerationConfig)
    if isinstance(eos.eos_token_id, int):
        return (eos.eos_token_id,)
    return eos.eos_token_id or ()


def _read_chat_template(folder: Path, config: _TokenizerConfig) -> str | None:
    """A template in a file of its own goes before the one in the tokenizer's configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    in_file = _read_json(folder / "chat_template.json", _ChatTemplateFile).chat_template
    template = in_file or config.chat_template
    if isinstance(template, list):
        return {entry.name: entry.template for entry in template}.get("default")
    return template


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from None


def _read_json(path: Path, kind: type[T]) -> T:
    """Reads a JSON object of the given kind; a missing file is an empty one."""
    try:
        data = path.read_bytes() if path.is_file() else b"{}"
        return msgspec.json.decode(data, type=kind)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None
