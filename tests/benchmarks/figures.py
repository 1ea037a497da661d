"""What a benchmark prints: figures beside their limits, and the exit status that follows.

Also what is read of the machine and of a process. Linux only: figures come from ``/proc``.
"""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MB = 1_000_000

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Report:
    """Figures as they come, one line each, and whether all of them are within their limits."""

    def __init__(self, title: str) -> None:
        self.missed: list[str] = []
        print(f"{title}; load average {load_average():.2f}", flush=True)

    def add(self, name: str, value: float, unit: str, *, below: float = math.inf) -> None:
        """Prints a figure; ``below`` is the limit that it must stay under."""
        line = f"  {name:<58} {value:>10.3f} {unit}"
        if below < math.inf:
            is_met = value < below
            line += f"  (below {below:g}) {'ok' if is_met else 'MISSED'}"
            if not is_met:
                self.missed.append(name)
        print(line, flush=True)

    def note(self, text: str) -> None:
        """Prints what is no figure."""
        print(f"  {text}", flush=True)

    @property
    def exit_status(self) -> int:
        """0 if every figure is within its limit, else 1."""
        print(f"  load average at the end {load_average():.2f}", flush=True)
        for name in self.missed:
            print(f"MISSED: {name}", flush=True)
        return 1 if self.missed else 0


def load_average() -> float:
    """Of the last minute: what else the machine has to do shows here, and so do we."""
    return os.getloadavg()[0]


def rss_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def peak_rss_bytes(pid: int) -> int:
    """The most that it has ever been."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmHWM"].split()[0]) << 10


def percentile(values: Iterable[float], fraction: float) -> float:
    """The value below which so much of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def spread(values: list[float]) -> str:
    """Lowest, median and highest, for a line of text."""
    return f"{min(values):.3f} / {statistics.median(values):.3f} / {max(values):.3f}"
