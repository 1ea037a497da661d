"""Grammars in the EBNF that vLLM's default backend takes, in the library's language.

Layer: structured. EBNF has no lexer and the library has one, in which a terminal takes as much text
as it can. So whatever does not lead back to itself becomes one terminal, however large: inside of
a terminal the two mean the same.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from trio_engine.errors import RequestError
from trio_engine.structured.ebnf_parser import (
    Alternatives,
    Reference,
    Repeat,
    Sequence,
    Terminal,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trio_engine.structured.ebnf_parser import Node

ROOT = "root"


def ebnf_to_lark(grammar: str) -> str:
    """Translates a grammar. It starts with the rule ``root``, wherever that stands.

    Raises:
        RequestError: it does not parse, or names a rule that is not there; says in which line.
    """
    rules = parse(grammar)
    if ROOT not in rules:
        raise RequestError(f"there is no rule {ROOT}")
    return _Translation(rules).text()


class _Written(NamedTuple):
    text: str
    is_regular: bool


class _Translation:
    """Writes rules under names of its own: a terminal is known by its capitals."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._regular = _regular_rules(rules)
        self._names = {
            name: f"T{index}" if name in self._regular else f"r{index}"
            for index, name in enumerate(rules)
        }
        self._pieces: list[str] = []

    def text(self) -> str:
        lines = [f"start: {self._names[ROOT]}"]
        lines += [f"{self._names[n]}: {self._write(node).text}" for n, node in self._rules.items()]
        lines += [f"P{index}: {piece}" for index, piece in enumerate(self._pieces)]
        return "\n".join(lines) + "\n"

    def _write(self, node: Node) -> _Written:
        if isinstance(node, Terminal):
            return _Written(node.text, is_regular=True)
        if isinstance(node, Reference):
            return _Written(self._names[node.name], node.name in self._regular)
        if isinstance(node, Repeat):
            text, is_regular = self._write(node.node)
            return _Written(f"({text}){_times(node)}", is_regular)
        if isinstance(node, Sequence):
            return self._write_sequence(node)
        parts = [self._write(inner) for inner in node.nodes]
        if all(part.is_regular for part in parts):
            return _Written(" | ".join(part.text for part in parts), is_regular=True)
        texts = [self._piece(text) if is_regular else text for text, is_regular in parts]
        return _Written(" | ".join(texts), is_regular=False)

    def _write_sequence(self, node: Sequence) -> _Written:
        parts = [self._write_in_sequence(inner) for inner in node.nodes]
        if all(part.is_regular for part in parts):
            return _Written(" ".join(part.text for part in parts) or '""', is_regular=True)
        texts = []
        for is_regular, group in groupby(parts, key=lambda part: part.is_regular):
            text = " ".join(part.text for part in group)
            texts.append(self._piece(text) if is_regular else text)
        return _Written(" ".join(texts), is_regular=False)

    def _write_in_sequence(self, node: Node) -> _Written:
        text, is_regular = self._write(node)
        return _Written(f"({text})" if isinstance(node, Alternatives) else text, is_regular)

    def _piece(self, text: str) -> str:
        """Makes a terminal of a piece of a rule; returns its name."""
        self._pieces.append(text)
        return f"P{len(self._pieces) - 1}"


def _times(repeat: Repeat) -> str:
    return f"{{{repeat.least},{'' if repeat.most is None else repeat.most}}}"


def _regular_rules(rules: Mapping[str, Node]) -> set[str]:
    """The rules from which no way leads back into itself."""
    users: defaultdict[str, set[str]] = defaultdict(set)
    num_uses: dict[str, int] = {}
    for name, node in rules.items():
        used = {reference.name for reference in _references(node, rules)}
        num_uses[name] = len(used)
        for other in used:
            users[other].add(name)
    found = [name for name, count in num_uses.items() if count == 0]
    for name in found:  # grows: a rule is regular once all that it uses are
        for user in users[name]:
            num_uses[user] -= 1
            if num_uses[user] == 0:
                found.append(user)
    return set(found)


def _references(node: Node, rules: Mapping[str, Node]) -> Iterator[Reference]:
    if isinstance(node, Reference):
        if node.name not in rules:
            raise RequestError(f"line {node.line}: there is no rule {node.name}")
        yield node
    elif isinstance(node, Repeat):
        yield from _references(node.node, rules)
    elif isinstance(node, Sequence | Alternatives):
        for inner in node.nodes:
            yield from _references(inner, rules)
