"""Writes the lifecycle diagram into architecture.md, from the table that the core runs by.

    python docs/make_lifecycle_diagram.py

``tests/test_docs.py`` fails when the diagram in the page is not the one made here.
"""

from __future__ import annotations

from pathlib import Path

from trio_engine.core.lifecycle import FIRST_STATUSES, TRANSITIONS, RequestStatus

PAGE = Path(__file__).with_name("architecture.md")
START = "<!-- lifecycle: made by docs/make_lifecycle_diagram.py -->\n"
END = "<!-- end of lifecycle -->\n"


def make_diagram() -> str:
    """The diagram as a fenced Mermaid block; events between the same two states share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in TRANSITIONS.items():
        arrows.setdefault((before.value, after.value), []).append(event.value)
    lines = [
        "```mermaid",
        "stateDiagram-v2",
        *(f"    [*] --> {status.value}" for status in FIRST_STATUSES),
        *(f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()),
        f"    {RequestStatus.FINISHED.value} --> [*]",
        "```",
    ]
    return "\n".join(lines) + "\n"


def with_diagram(page: str) -> str:
    """The page's text with the present diagram between its two marks."""
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    return head + START + make_diagram() + END + tail


if __name__ == "__main__":
    PAGE.write_text(with_diagram(PAGE.read_text()))
