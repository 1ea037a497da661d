"""Typed look-ups in a parsed configuration, whose errors name file, key and value.

Layer: model, without torch. Shared by both configuration parsers; knows no key by itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Far above any real model; keeps a nonsense value from becoming an allocation.
_MAX_INTEGER = 1 << 31
_MAX_NUMBER = sys.float_info.max  # an integer may be larger


class Fields:
    """A mapping from an untrusted file. A null value counts as absent.

    Args:
        source: the file, for messages.
        values: what it holds.
        prefix: put before every key, in look-ups and in messages.
    """

    def __init__(self, source: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.source = source
        self._values = values
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.raw(key) is not None

    def raw(self, key: str) -> Any:
        """The value as it is, None if absent."""
        return self._values.get(self._prefix + key)

    def has_null(self, key: str) -> bool:
        """Whether the key is there, but says nothing."""
        return self._prefix + key in self._values and self.raw(key) is None

    def fail(self, key: str, why: str) -> NoReturn:
        """Raises ModelError for a key, with its value."""
        raise ModelError(f"{self.source}: {self._prefix}{key} = {self.raw(key)!r}: {why}")

    def missing(self, key: str) -> NoReturn:
        """Raises ModelError for a key that must be there."""
        raise ModelError(f"{self.source}: {self._prefix}{key} is missing")

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER
    ) -> int:
        """An integer within bounds. Raises ModelError if it is none, or absent without default."""
        value = self.raw(key)
        if value is None:
            return self.missing(key) if default is None else default
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, "is not an integer")
        if not minimum <= value <= maximum:
            self.fail(key, f"is not between {minimum} and {maximum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number. Raises ModelError if it is none, or absent without default."""
        value = self.raw(key)
        if value is None:
            return self.missing(key) if default is None else default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, "is not a number")
        if not 0 < value <= _MAX_NUMBER:
            self.fail(key, "is not positive and finite")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean. Raises ModelError if it is something else."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "is neither true nor false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises ModelError if it is none, or absent without default."""
        value = self.raw(key)
        if value is None:
            return self.missing(key) if default is None else default
        if not isinstance(value, str):
            self.fail(key, "is not a string")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them. Raises ModelError for what is outside the vocabulary."""
        value = self.raw(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                self.fail(key, "is neither a token id nor a list of them")
            if not 0 <= token_id < vocab_size:
                self.fail(key, f"is outside a vocabulary of {vocab_size}")
        return tuple(ids)
