"""The state machines of the testing kit, with the profile's examples and, if slow, with many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from trio_engine.testing.machines import BlockPoolMachine, EngineCoreMachine, EngineMachine

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine


@pytest.mark.parametrize("machine", [BlockPoolMachine, EngineCoreMachine, EngineMachine])
def test_promises_are_kept(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "max_examples"),
    [(BlockPoolMachine, 2000), (EngineCoreMachine, 2000), (EngineMachine, 500)],
)
def test_promises_are_kept_in_many_examples(
    machine: type[RuleBasedStateMachine], max_examples: int
) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=max_examples))
