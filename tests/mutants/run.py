"""Plants known faults in a copy of the package and sees whether the state machines find them.

    python -m tests.mutants.run                 # all patches beside this file
    python -m tests.mutants.run outbox_by_id    # some of them

A patch begins with the name of the machine that should find it. Told is how many rules the shrunk
example has; more than ``WANTED_RULES`` is a machine that shrinks badly.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from hypothesis.stateful import INVARIANT_MARKER

from trio_engine.testing import machines

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "trio_engine"
MAX_EXAMPLES = {"BlockPoolMachine": 2000, "EngineCoreMachine": 2000, "EngineMachine": 2000}
WANTED_RULES = 8
TIMEOUT_S = 1200.0
"""Hypothesis itself gives up shrinking after five minutes, and may do so three times."""

FOUND_BY = re.compile(r"^Found by: (\w+)$", re.MULTILINE)
STEP = re.compile(r"^(?:[\w, ]+ = )?state\.(\w+)\(.*$", re.MULTILINE)

# Run beside the copy, without a database: the same fault, the same example. Hypothesis gives up
# shrinking after some tries without progress: then it begins again, from elsewhere.
PROGRAM = """
import logging, re, sys, traceback, trio_engine
from hypothesis import HealthCheck, Phase, core, settings
from hypothesis.stateful import INVARIANT_MARKER, run_state_machine_as_test
from trio_engine.testing import machines

assert trio_engine.__file__.startswith(sys.argv[1]), trio_engine.__file__
machine, max_examples = getattr(machines, sys.argv[2]), int(sys.argv[3])
options = settings(
    max_examples=max_examples,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
logging.disable()
invariants = {name for name in dir(machine) if hasattr(getattr(machine, name), INVARIANT_MARKER)}


def fail(seed):
    core.global_force_seed = seed
    try:
        run_state_machine_as_test(machine, settings=settings(options, derandomize=seed is None))
    except BaseException:
        return traceback.format_exc()
    return ""


def num_rules(error):
    rules = re.findall(r"^state\\.(\\w+)", error, re.MULTILINE)
    return sum(name not in invariants for name in rules)


found = fail(None)
for seed in (0, 1):
    if num_rules(found) > int(sys.argv[4]):
        found = min(found, fail(seed) or found, key=num_rules)
if found:
    print("FOUND", found)
"""


class Outcome(NamedTuple):
    """What became of one fault; without steps if nothing was found."""

    name: str
    machine: str
    steps: list[str]
    error: str

    @property
    def is_found(self) -> bool:
        return bool(self.steps)


def patches(names: list[str]) -> list[Path]:
    """The patches of these names, or all."""
    return [HERE / f"{name}.patch" for name in names] or sorted(HERE.glob("*.patch"))


def run_mutant(patch: Path) -> Outcome:
    """Runs a machine over a copy of the package with one fault in it.

    Raises:
        RuntimeError: the patch does not fit the package any more, or the machine did not run.
    """
    machine = machine_for(patch)
    with tempfile.TemporaryDirectory() as folder:
        copy_with_fault(patch, folder)
        arguments = [folder, machine, str(MAX_EXAMPLES[machine]), str(WANTED_RULES)]
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    if ended.returncode:
        raise RuntimeError(f"{patch.name}: {ended.stderr}")
    _, _, error = ended.stdout.partition("FOUND")
    return Outcome(patch.stem, machine, _rules_in(error, machine), error)


def machine_for(patch: Path) -> str:
    """The machine that a patch names; RuntimeError if there is no such machine."""
    found_by = FOUND_BY.search(patch.read_text())
    if found_by is None or found_by[1] not in MAX_EXAMPLES:
        raise RuntimeError(f"{patch.name} does not say who should find it")
    return found_by[1]


def _rules_in(error: str, machine: str) -> list[str]:
    """The steps of a failing example, without the invariants that were checked between them."""
    rules = getattr(machines, machine)
    invariants = {name for name in dir(rules) if hasattr(getattr(rules, name), INVARIANT_MARKER)}
    no_rules = {"teardown", *invariants}
    return [step[0] for step in STEP.finditer(error) if step[1] not in no_rules]


def copy_with_fault(patch: Path, folder: str) -> None:
    """Copies the package into a folder, with a patch; RuntimeError if that does not apply."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, Path(folder) / PACKAGE.name, ignore=ignored)
    applied = subprocess.run(
        ["git", "apply", str(patch.resolve())],
        cwd=folder,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).parent)},
        capture_output=True,
        text=True,
    )
    if applied.returncode:
        raise RuntimeError(f"{patch.name} does not apply: {applied.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="patches without .patch; all if none")
    parser.add_argument(
        "--show", action="store_true", help="print the errors with their examples too"
    )
    options = parser.parse_args()
    outcomes = []
    for patch in patches(options.names):
        started = time.monotonic()
        outcome = run_mutant(patch)
        outcomes.append(outcome)
        verdict = f"{len(outcome.steps)} rules" if outcome.is_found else "NOT FOUND"
        took = f"{time.monotonic() - started:.0f} s"
        print(f"{outcome.name:40} {outcome.machine:20} {verdict:10} {took:>6}", flush=True)
        if options.show:
            print(outcome.error)
    good = [o for o in outcomes if o.is_found and len(o.steps) <= WANTED_RULES]
    print(f"{len(good)} of {len(outcomes)} found in at most {WANTED_RULES} rules")
    return 0 if len(good) == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
