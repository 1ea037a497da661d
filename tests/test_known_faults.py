"""The page of known faults and the tests that show that we are free of them name each other."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "known-faults.md"

SECTION = re.compile(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"""\bpytest\.mark\.known_fault\(kind="([\w-]+)"\)""")
TEST_FILE = re.compile(r"`(tests/[\w/]+\.py)`")


def files_by_kind() -> dict[str, set[str]]:
    """Of each kind, the files that hold a marked test."""
    found = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for kind in MARK.findall(path.read_text()):
            found[kind].add(str(path.relative_to(ROOT)))
    return dict(found)


def test_each_kind_of_fault_names_the_files_that_show_it_and_no_others() -> None:
    sections = dict(SECTION.findall(PAGE.read_text()))
    shown = {kind: set(TEST_FILE.findall(text)) for kind, text in sections.items()}
    assert shown == files_by_kind()


def test_each_kind_of_fault_was_reported_in_public() -> None:
    for kind, text in SECTION.findall(PAGE.read_text()):
        reported = text.partition("Reported: ")[2].partition("\n\n")[0]
        assert "https://github.com/" in reported, kind
