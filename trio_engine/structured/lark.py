"""Words of the library's grammar language, a dialect of Lark's.

Layer: structured.
"""

from __future__ import annotations

import msgspec

# Where a grammar leaves no choice of text, the library would leave none of tokens either, by
# asking the tokenizer. The model knows how it spells a text, other options may forbid that one
# spelling, and the question would have the forward thread wait for the interpreter.
OPTIONS = '%llguidance {"no_forcing": true}\n'

ANY_CHAR = "/(?s:.)/"
ANY_TEXT = "/(?s:.*)/"


def quote(text: str) -> str:
    """A text as a terminal."""
    return msgspec.json.encode(text).decode()


def char_class(ranges: list[tuple[str, str]], *, is_negated: bool) -> str:
    """A terminal for one character of these ranges, ends included, or for any other."""
    inside = "".join(
        rf"\u{{{ord(low):x}}}-\u{{{ord(high):x}}}" if low != high else rf"\u{{{ord(low):x}}}"
        for low, high in ranges
    )
    return f"/[{'^' if is_negated else ''}{inside}]/"
