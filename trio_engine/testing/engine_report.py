"""What ``check_engine`` found: promises that an engine keeps and breaks, and why.

Public kit, pure.
"""

from __future__ import annotations

import textwrap

import msgspec

_WIDTH = 100
_GROUP_WIDTH = 7
_INDENT = " " * (_GROUP_WIDTH + 10)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One promise, kept or broken.

    Attributes:
        group: what kind of promise it is.
        promise: in words.
        why: what happened instead; empty if it was kept.
    """

    group: str
    promise: str
    why: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the promise was kept."""
        return not self.why

    def line(self) -> str:
        """For a terminal; below it, the reason if the promise was broken."""
        state = "ok    " if self.is_ok else "FAILED"
        why = textwrap.wrap(self.why, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        return "\n".join([f"{state}  {self.group:<{_GROUP_WIDTH}}  {self.promise}", *why])


class EngineReport(msgspec.Struct, kw_only=True):
    """All findings about one engine, in the order of the checks."""

    command: list[str]
    findings: list[Finding] = msgspec.field(default_factory=list)

    @property
    def failures(self) -> list[Finding]:
        """The promises that were broken."""
        return [finding for finding in self.findings if not finding.is_ok]

    @property
    def is_ok(self) -> bool:
        """Whether there were promises and all were kept."""
        return bool(self.findings) and not self.failures

    def summary(self) -> str:
        """A line for each group: how many of its promises were kept."""
        lines = []
        for group in dict.fromkeys(finding.group for finding in self.findings):
            found = [finding for finding in self.findings if finding.group == group]
            kept = sum(finding.is_ok for finding in found)
            lines.append(f"{group}: {kept} of {len(found)} kept")
        return "\n".join(lines)

    def table(self) -> str:
        """All findings for a terminal, the reasons below the promises that were broken."""
        return "\n".join([*(finding.line() for finding in self.findings), "", self.summary()])
