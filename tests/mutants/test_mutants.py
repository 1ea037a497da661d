"""The patches still fit, and the machines find those that are quick to find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.mutants.run import HERE, WANTED_RULES, copy_with_fault, machine_for, patches, run_mutant

if TYPE_CHECKING:
    from pathlib import Path

QUICK = ["block_freed_while_shared", "abort_from_another_client"]


@pytest.mark.parametrize("patch", patches([]), ids=lambda patch: patch.stem)
def test_a_patch_applies_and_names_its_machine(patch: Path, tmp_path: Path) -> None:
    assert machine_for(patch)
    copy_with_fault(patch, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_found_and_shrunk(name: str) -> None:
    outcome = run_mutant(HERE / f"{name}.patch")
    assert outcome.is_found
    assert len(outcome.steps) <= WANTED_RULES, outcome.error
