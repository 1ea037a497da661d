"""Whose processor time counts as an engine's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trio_engine.bench.engine import process_cpu_s

BURNT_S = 0.2

HELPER = f"""
import time

while time.process_time() < {BURNT_S}:
    pass
print("burnt", flush=True)
input()
"""

# Waits for the helper while that lives, and then lives on without it.
PARENT = f"""
import subprocess, sys

subprocess.run([sys.executable, "-c", {HELPER!r}])
print("alone", flush=True)
input()
"""


def test_processor_time_of_helpers_counts_while_they_live_and_after() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for state in ("burnt", "alone"):
            assert parent.stdout.readline() == f"{state}\n"
            # The system counts in steps of 10 ms, of the user's time and its own.
            assert process_cpu_s(parent.pid) >= BURNT_S - 0.02
            parent.stdin.write("\n")
            parent.stdin.flush()
    with pytest.raises(ProcessLookupError, match=f"no process {parent.pid}"):
        process_cpu_s(parent.pid)
