"""Reads grammars in llama.cpp's EBNF.

Layer: structured. What they mean in the library's language is in ``ebnf``.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from trio_engine.errors import RequestError
from trio_engine.structured.lark import ANY_CHAR, char_class, quote

MAX_DEPTH = 64
"""Of groups in each other: the parser calls itself for each."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """A literal or a class, already in the library's language."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A rule by name, and where."""

    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """So many of one thing; ``most`` None for any number."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; nothing if empty."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """One of them."""

    nodes: tuple[Node, ...]


Node: TypeAlias = Terminal | Reference | Repeat | Sequence | Alternatives

_WORD = re.compile(
    r"""
    (?P<space> \s+ | \#[^\n]* )
    | (?P<rule> [A-Za-z_][\w-]* ) (?= \s* ::= )
    | (?P<name> [A-Za-z_][\w-]* )
    | (?P<define> ::= )
    | (?P<literal> "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' )
    | (?P<class> \[(?:[^\]\\\n]|\\.)*\] )
    | (?P<repeat> [*+?] | \{ \s* \d+ \s* (?: , \s* \d* \s* )? \} )
    | (?P<sign> [|().] )
    """,
    re.VERBOSE,
)
_CHAR = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse(grammar: str) -> dict[str, Node]:
    """The rules of a grammar by name, in order.

    Raises:
        RequestError: what does not fit, and in which line.
    """
    return _Parser(grammar).rules()


@dataclass(frozen=True, slots=True)
class _Word:
    kind: str
    text: str
    line: int


class _Parser:
    def __init__(self, grammar: str) -> None:
        self._words = _split(grammar)
        self._place = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._next.kind != "end":
            name = self._take("rule", "a rule")
            if name.text in rules:
                _fail(name, f"rule {name.text} is there twice")
            self._take("define", "::=")
            rules[name.text] = self._alternatives()
        return rules

    @property
    def _next(self) -> _Word:
        return self._words[self._place]

    def _advance(self) -> _Word:
        word = self._next
        self._place += 1
        return word

    def _take(self, kind: str, wanted: str) -> _Word:
        if self._next.kind != kind:
            _fail(self._next, f"expected {wanted}, got {self._next.text!r}")
        return self._advance()

    def _alternatives(self) -> Node:
        nodes = [self._sequence()]
        while self._next.text == "|":
            self._advance()
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else Alternatives(tuple(nodes))

    def _sequence(self) -> Node:
        nodes: list[Node] = []
        while (node := self._item()) is not None:
            nodes.append(self._repeated(node))
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _item(self) -> Node | None:
        word = self._next
        if word.kind in ("rule", "end") or (word.kind == "sign" and word.text in "|)"):
            return None
        self._advance()
        if word.kind == "name":
            return Reference(word.text, word.line)
        if word.kind == "literal":
            return Terminal(quote("".join(char for char, _ in _chars(word, word.text[1:-1]))))
        if word.kind == "class":
            return _class(word)
        if word.text == ".":
            return Terminal(ANY_CHAR)
        if word.text == "(":
            return self._group(word)
        _fail(word, f"unexpected {word.text!r}")

    def _group(self, opening: _Word) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            _fail(opening, f"groups nest more than {MAX_DEPTH} deep")
        node = self._alternatives()
        if self._advance().text != ")":
            _fail(opening, "a group is not closed")
        self._depth -= 1
        return node

    def _repeated(self, node: Node) -> Node:
        if self._next.kind != "repeat":
            return node
        word = self._advance()
        least, most = _SIGNS.get(word.text) or _bounds(word)
        return Repeat(node, least, most)


def _split(grammar: str) -> list[_Word]:
    words = []
    place, line = 0, 1
    while place < len(grammar):
        match = _WORD.match(grammar, place)
        if match is None or match.lastgroup is None:
            _fail(_Word("", "", line), f"cannot read {grammar[place : place + 20]!r}")
        if match.lastgroup != "space":
            words.append(_Word(match.lastgroup, match[0], line))
        line += match[0].count("\n")
        place = match.end()
    return [*words, _Word("end", "the end", line)]


def _chars(word: _Word, inside: str) -> list[tuple[str, bool]]:
    """The characters that a literal or a class stands for, and whether each was escaped."""
    chars = []
    for match in _CHAR.finditer(inside):
        code = match[1] or match[2] or match[3]
        if code is None:
            escaped = match[4]
            char = match[5] if escaped is None else _CONTROLS.get(escaped, escaped)
            chars.append((char, escaped is not None))
        elif int(code, 16) > sys.maxunicode or 0xD800 <= int(code, 16) < 0xE000:
            _fail(word, f"{match[0]} is no character")
        else:
            chars.append((chr(int(code, 16)), True))
    return chars


def _class(word: _Word) -> Terminal:
    inside = word.text[1:-1]
    is_negated = inside.startswith("^")
    chars = _chars(word, inside[is_negated:])
    ranges = []
    place = 0
    while place < len(chars):
        low = high = chars[place][0]
        if place + 2 < len(chars) and chars[place + 1] == ("-", False):
            high = chars[place + 2][0]
            place += 2
        if low > high:
            _fail(word, f"{low}-{high} is no range")
        ranges.append((low, high))
        place += 1
    if not ranges:
        _fail(word, "a class must not be empty")
    return Terminal(char_class(ranges, is_negated=is_negated))


def _bounds(word: _Word) -> tuple[int, int | None]:
    least, comma, most = word.text.strip("{}").replace(" ", "").partition(",")
    low = int(least)
    high = low if not comma else int(most) if most else None
    if high is not None and high < low:
        _fail(word, f"{word.text} allows nothing")
    return low, high


def _fail(word: _Word, why: str) -> NoReturn:
    raise RequestError(f"line {word.line}: {why}")
