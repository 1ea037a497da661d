"""The state machines of the testing kit, with the profile's examples and, if slow, with many."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from trio_engine.requests import PauseMode
from trio_engine.sampling_params import RepetitionDetectionParams
from trio_engine.testing.machines import BlockPoolMachine, EngineCoreMachine, EngineMachine

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

# All of them with HYPOTHESIS_PROFILE unset, a fifth in CI.
MANY_EXAMPLES = {BlockPoolMachine: 2000, EngineCoreMachine: 2000, EngineMachine: 500}


# Rules that have nothing to do are left out of an example, and on a busy machine all is slow.
UNCHECKED = settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@pytest.mark.parametrize("machine", MANY_EXAMPLES)
def test_promises_are_kept(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=UNCHECKED)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MANY_EXAMPLES)
def test_promises_are_kept_in_many_examples(machine: type[RuleBasedStateMachine]) -> None:
    num_examples = MANY_EXAMPLES[machine]
    if os.environ.get("HYPOTHESIS_PROFILE") == "ci":
        num_examples //= 5
    many = settings(UNCHECKED, max_examples=num_examples)
    run_state_machine_as_test(machine, settings=many)


# What a failure looks like


class ImpatientCore(EngineCoreMachine):
    """Takes a client's second token for a fault."""

    @invariant()
    def nothing_happens(self) -> None:
        assert all(len(life.log.token_ids) < 2 for life in self.promises.lives)


class ImpatientEngine(EngineMachine):
    """Takes a client's second token for a fault."""

    @invariant()
    def nothing_happens(self) -> None:
        assert all(len(life.log.token_ids) < 2 for life in self.promises.lives)


def failing_steps(machine: type[RuleBasedStateMachine]) -> str:
    """What Hypothesis prints of a failure, as a program."""
    options = settings(
        UNCHECKED, phases=[Phase.generate, Phase.shrink], derandomize=True, database=None
    )
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(machine, settings=options)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    return notes[notes.index("state = ") :].partition("state.teardown()")[0]


@pytest.mark.parametrize(
    "machine", [ImpatientCore, pytest.param(ImpatientEngine, marks=pytest.mark.slow)]
)
def test_a_failure_is_printed_as_few_steps_that_fail_again(
    machine: type[RuleBasedStateMachine],
) -> None:
    steps = failing_steps(machine)
    assert len(re.findall(r"^state\.\w+\(\w+=", steps, re.MULTILINE)) <= 4, steps
    assert re.search(r"\bprompt'?[=:] ?\[0\]", steps), steps
    names: dict[str, Any] = {
        each.__name__: each for each in (machine, PauseMode, RepetitionDetectionParams)
    }
    with pytest.raises(AssertionError):
        exec(steps, names)
    state = names["state"]
    if isinstance(state, EngineMachine) and state.guest is not None:
        state.guest.close()
