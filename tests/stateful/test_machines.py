"""The state machines of the testing kit, with the profile's examples and, if slow, with many."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from trio_engine.requests import PauseMode
from trio_engine.sampling_params import RepetitionDetectionParams
from trio_engine.testing.machines import BlockPoolMachine, EngineCoreMachine, EngineMachine

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

# All of them with HYPOTHESIS_PROFILE unset, a fifth in CI.
MANY_EXAMPLES = {BlockPoolMachine: 2000, EngineCoreMachine: 2000, EngineMachine: 500}


def run(machine: type[RuleBasedStateMachine], **options: int) -> None:
    # Rules without anything to do are left out of an example; on a busy machine all is slow.
    checks = [HealthCheck.filter_too_much, HealthCheck.too_slow]
    run_state_machine_as_test(machine, settings=settings(suppress_health_check=checks, **options))


@pytest.mark.parametrize("machine", MANY_EXAMPLES)
def test_promises_are_kept(machine: type[RuleBasedStateMachine]) -> None:
    run(machine)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MANY_EXAMPLES)
def test_promises_are_kept_in_many_examples(machine: type[RuleBasedStateMachine]) -> None:
    num_examples = MANY_EXAMPLES[machine]
    if os.environ.get("HYPOTHESIS_PROFILE") == "ci":
        num_examples //= 5
    run(machine, max_examples=num_examples)


# What a failure looks like


class ImpatientCore(EngineCoreMachine):
    """Takes a third token, and an aborted request, for a fault."""

    @invariant()
    def nothing_happens(self) -> None:
        for life in self.promises.lives:
            assert len(life.log.token_ids) < 3
            assert not life.is_aborted


class ImpatientEngine(EngineMachine):
    """Takes a client's second token for a fault."""

    @invariant()
    def nothing_happens(self) -> None:
        assert all(len(life.log.token_ids) < 2 for life in self.promises.lives)


def failing_steps(machine: type[RuleBasedStateMachine]) -> str:
    """What Hypothesis prints of a failure, as a program."""
    with pytest.raises(AssertionError) as caught:
        run(machine, max_examples=500)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    return notes[notes.index("state = ") :].partition("state.teardown()")[0]


@pytest.mark.parametrize("machine", [ImpatientCore, ImpatientEngine])
def test_a_failure_is_printed_as_steps_that_fail_again(
    machine: type[RuleBasedStateMachine],
) -> None:
    steps = failing_steps(machine)
    classes = (machine, PauseMode, RepetitionDetectionParams)
    names = {each.__name__: each for each in classes}
    with pytest.raises(AssertionError):
        exec(steps, names)
    if isinstance(state := names["state"], EngineMachine) and state.guest is not None:
        state.guest.close()


def test_a_failure_shrinks_to_few_steps_with_short_prompts() -> None:
    steps = failing_steps(ImpatientEngine)
    rules = [line for line in steps.splitlines() if line.startswith("state.") and "()" not in line]
    assert len(rules) <= 3
    assert "'prompt': [0]" in steps or "prompt=[0]" in steps
