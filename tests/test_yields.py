"""No generator holds a nursery or a cancel scope across a yield.

Such a scope would be active in the caller, who may close the generator elsewhere or never. What
is entered and left by a ``with`` block is the exception: a context manager, a fixture.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("trio_engine", "docs/examples", "tests", "fuzz")
    for path in (ROOT / folder).rglob("*.py")
)

OPENERS = {"open_nursery", "CancelScope", "move_on_after", "move_on_at", "fail_after", "fail_at"}
ENTERED_BY_A_BLOCK = {"contextmanager", "asynccontextmanager", "fixture"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
pytestmark = pytest.mark.known_fault(kind="scope-across-a-yield")


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name, of what is called if it is a call."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_scope(node: ast.expr) -> bool:
    name = name_of(node)
    return name in OPENERS or name.endswith(("scope", "nursery"))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, without the functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from own_nodes(child)


def yields_in(node: ast.AST) -> list[int]:
    """Lines of the yields in a node."""
    return [n.lineno for n in own_nodes(node) if isinstance(n, ast.Yield | ast.YieldFrom)]


def faults_in(source: str) -> list[int]:
    """Lines of the yields that stand in a scope."""
    if "yield" not in source:
        return []
    return [
        line
        for function in ast.walk(ast.parse(source))
        if isinstance(function, Function)
        and not ENTERED_BY_A_BLOCK & {name_of(d) for d in function.decorator_list}
        for block in own_nodes(function)
        if isinstance(block, ast.With | ast.AsyncWith)
        and any(is_scope(item.context_expr) for item in block.items)
        for line in yields_in(block)
    ]


def test_no_yield_stands_in_a_nursery_or_a_cancel_scope() -> None:
    found = {str(path): faults_in(path.read_text()) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_package_gives_nobody_an_async_generator() -> None:
    """Its clean-up could not be promised; streams are classes."""
    found = [
        f"{path}: {function.name}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "trio_engine") and "yield" in path.read_text()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.AsyncFunctionDef) and yields_in(function)
        if not ENTERED_BY_A_BLOCK & {name_of(d) for d in function.decorator_list}
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("async def f():\n    async with trio.open_nursery():\n        yield 1", [3]),
        ("async def f():\n    with a, move_on_after(1):\n        if x:\n            yield 1", [4]),
        ("async def f():\n    with self.scope as s:\n        x = yield", [3]),
        ("@asynccontextmanager\nasync def f():\n    with fail_after(1):\n        yield", []),
        ("def f():\n    with fail_after(1):\n        pass\n    yield", []),
        ("async def f():\n    with fail_after(1):\n        def g():\n            yield", []),
        ("async def f():\n    async with engine.generate() as stream:\n        yield 1", []),
    ],
)
def test_the_check_finds_them(source: str, lines: list[int]) -> None:
    assert faults_in(source) == lines
