"""The documentation says what the code says: names, tables, links, examples."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import trio_engine
from tests.test_layers import ALLOWED, FOREIGN, modules
from trio_engine.core.admission import UNSUPPORTED_REQUEST_FIELDS, UNSUPPORTED_SAMPLING_FIELDS
from trio_engine.engine.utility_methods import built_in_methods
from trio_engine.engine_arguments import add_engine_arguments

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
REFERENCE = sorted((DOCS / "reference").glob("*.md"))

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
SECTION = re.compile(r"^## `(trio_engine[\w.]*)`\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
LISTED_NAME = re.compile(r"^ *- `([\w.]+)`", re.MULTILINE)
IN_BACKTICKS = re.compile(r"`([^`\n]+)`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    """A page's text without its fenced blocks."""
    return FENCED.sub("", page.read_text())


def anchors_of(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = [re.sub(r"[`*]", "", title) for title in HEADING.findall(prose_of(page))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def rows_of(page: Path, header: str) -> list[list[str]]:
    """The cells of the table that begins with ``header``."""
    _, found, rest = page.read_text().partition(header + "\n")
    assert found, f"{name_of(page)} has no table {header}"
    lines = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def in_backticks(text: str) -> set[str]:
    return set(IN_BACKTICKS.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose_of(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors_of(target), link


# Files and names


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_a_page_exist(page: Path) -> None:
    for text in in_backticks(prose_of(page)):
        if not re.fullmatch(r"[\w./]+/[\w.]+\.(py|md)", text) or text.startswith(("v1/", "vllm/")):
            continue
        assert (ROOT / text).exists() or (ROOT / "trio_engine" / text).exists(), text


@pytest.fixture(scope="module")
def members() -> dict[str, set[str]]:
    """By class name, what the package's classes of that name define or set on themselves."""
    found: dict[str, set[str]] = {}
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                for inner in ast.walk(node):
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        names.add(inner.name)
                    elif isinstance(inner, ast.Name):
                        names.add(inner.id)
                    elif isinstance(inner, ast.Attribute):
                        names.add(inner.attr)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_members_named_in_a_page_exist(page: Path, members: dict[str, set[str]]) -> None:
    for text in in_backticks(prose_of(page)):
        for class_name, member in re.findall(r"\b([A-Z]\w+)\.(\w+)", text):
            if class_name in members and "/" not in text:
                assert member in members[class_name], text


@pytest.mark.parametrize("page", REFERENCE, ids=name_of)
def test_names_of_the_reference_exist(page: Path) -> None:
    sections = SECTION.findall(page.read_text())
    assert sections
    for module_name, body in sections:
        module = importlib.import_module(module_name)
        for name in LISTED_NAME.findall(body):
            found: Any = module
            for part in name.split("."):
                assert hasattr(found, part), f"{module_name} has no {name}"
                found = getattr(found, part)


def test_the_reference_has_a_section_for_every_module() -> None:
    described = {module for page in REFERENCE for module, _ in SECTION.findall(page.read_text())}
    wanted = {
        f"trio_engine.{name}" if name else "trio_engine"
        for name, path in modules()
        if not name or path.name != "__init__.py"
    }
    assert described == wanted


def test_the_reference_lists_the_public_names() -> None:
    sections = dict(SECTION.findall((DOCS / "reference" / "client.md").read_text()))
    listed = set(LISTED_NAME.findall(sections["trio_engine"]))
    assert listed == set(trio_engine.__all__) - {"__version__"}


# Architecture


def test_architecture_names_every_module_and_no_other() -> None:
    text = (DOCS / "architecture.md").read_text().partition("## Modules")[2]
    named = re.findall(r"^- `([\w/]+\.py)`: \S", text.partition("## Layers")[0], re.MULTILINE)
    package = ROOT / "trio_engine"
    wanted = [
        str(path.relative_to(package))
        for name, path in modules()
        if not name or path.name != "__init__.py"
    ]
    assert sorted(named) == sorted(wanted)


def test_the_lifecycle_diagram_is_the_one_that_the_table_makes() -> None:
    maker = runpy.run_path(str(DOCS / "make_lifecycle_diagram.py"))
    page = (DOCS / "architecture.md").read_text()
    assert maker["make_diagram"]() in page
    assert maker["with_diagram"](page) == page


def test_the_layers_are_those_of_the_table() -> None:
    rows = rows_of(DOCS / "architecture.md", "| layer | may import |")
    shown = {layer.strip("`"): in_backticks(may_import) for layer, may_import in rows}
    assert shown == {layer or "trio_engine": allowed for layer, allowed in ALLOWED.items()}


def test_the_places_of_foreign_packages_are_those_of_the_table() -> None:
    rows = rows_of(DOCS / "architecture.md", "| package | may be imported by |")
    assert {package.strip("`"): in_backticks(layers) for package, layers in rows} == FOREIGN


# What is served


def test_the_readme_lists_what_is_refused() -> None:
    text = prose_of(ROOT / "README.md").partition("a test compares them:")[2]
    fields, _, rest = text.partition("- sampling fields:")
    assert in_backticks(fields) == set(UNSUPPORTED_REQUEST_FIELDS)
    assert in_backticks(rest.partition("\n\n")[0]) == set(UNSUPPORTED_SAMPLING_FIELDS)


def test_the_reference_lists_the_utility_methods() -> None:
    methods = built_in_methods(cast("Any", SimpleNamespace(core=None)))
    rows = rows_of(DOCS / "reference" / "engine.md", "| method | arguments | answer |")
    assert {name for row in rows for name in in_backticks(row[0])} == set(methods)


def test_the_reference_lists_the_engine_options() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    rows = rows_of(DOCS / "reference" / "cli.md", "| flag | default | |")
    assert {flag for row in rows for flag in in_backticks(row[0])} == flags


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Of a command, and of the commands below it."""
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags = flags.union(*map(flags_of, action.choices.values()))
    return flags


@pytest.mark.parametrize("command", ["generate", "engine", "bench"])
def test_the_reference_lists_the_flags_of_a_command(command: str) -> None:
    flags = flags_of(importlib.import_module(f"trio_engine.cli.{command}")._parser())
    page = (DOCS / "reference" / "cli.md").read_text()
    shown = {text.split()[0] for text in in_backticks(page) if text.startswith("--")}
    assert flags - {"-h", "--help"} <= shown


# Examples


def test_the_readme_shows_the_streaming_example_whole() -> None:
    blocks = [text for kind, text in FENCED.findall((ROOT / "README.md").read_text()) if kind]
    assert (DOCS / "examples" / "stream.py").read_text() in blocks


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_in_a_page_is_part_of_an_example(page: Path) -> None:
    sources = [path.read_text() for path in EXAMPLES]
    for kind, block in FENCED.findall(page.read_text()):
        if kind == "python":
            assert any(block in source for source in sources), block


def test_every_example_is_run_by_a_test() -> None:
    runner = (ROOT / "tests" / "process" / "test_examples.py").read_text()
    for path in EXAMPLES:
        assert f'"{path.name}"' in runner, path.name


# The commands that .ci/run takes out of the README


@pytest.mark.parametrize("which", ["main", "test"])
def test_the_readme_has_each_command_on_one_line(which: str) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.findall(rf"^<!-- {which} command -->\n```sh\n(.*)\n```$", text, re.MULTILINE)
    assert len(found) == 1
    assert found[0].startswith("python3 -m venv .venv && ")


def test_every_folder_of_tests_has_its_place_in_the_page() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    tops = {path.relative_to(ROOT / "tests").parts[0] for path in folders if path.name != "tests"}
    rows = rows_of(DOCS / "testing.md", "| folder | what is there | what it may use |")
    shown = {row[0].strip("`").removeprefix("tests/").rstrip("/") for row in rows}
    assert tops <= shown
