"""The errors: one root, and what each one carries."""

from __future__ import annotations

import inspect

import pytest

from trio_engine import errors
from trio_engine.errors import (
    BRIEF_LENGTH,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineStartError,
    RequestError,
    RequestFailedError,
    RequestStepError,
    brief,
)

ALL = [value for value in vars(errors).values() if inspect.isclass(value)]


@pytest.mark.parametrize("error", ALL)
def test_every_error_has_the_one_root_and_says_what_it_means(error: type[Exception]) -> None:
    assert issubclass(error, EngineError)
    assert error.__doc__


@pytest.mark.parametrize("error", [ConfigError, RequestError])
def test_a_bad_value_of_the_caller_is_a_value_error_too(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


@pytest.mark.parametrize("error", [EngineStartError, EngineDeadError])
def test_the_end_of_a_process_carries_its_status_and_last_lines(
    error: type[EngineStartError] | type[EngineDeadError],
) -> None:
    raised = error("it is gone", exit_status=-9, stderr_tail="killed")
    assert (str(raised), raised.exit_status, raised.stderr_tail) == ("it is gone", -9, "killed")
    bare = error("it is gone")
    assert (bare.exit_status, bare.stderr_tail) == (None, "")


def test_a_failed_request_is_named_with_its_reason() -> None:
    error = RequestFailedError("it failed", request_id="a", reason="out of memory")
    assert (str(error), error.request_id, error.reason) == ("it failed", "a", "out of memory")
    assert RequestFailedError("it failed", request_id="a").reason is None


def test_rows_at_fault_are_kept_as_they_were_when_the_step_failed() -> None:
    slots = [1, 2]
    error = RequestStepError("bad rows", slots=slots)
    slots.append(3)
    assert (str(error), error.slots) == ("bad rows", (1, 2))


def test_a_long_text_of_a_peer_is_shown_without_its_middle() -> None:
    assert brief("x" * BRIEF_LENGTH) == "x" * BRIEF_LENGTH
    shown = brief("field " + "x" * 10**6 + " at 3")
    assert shown.startswith("field x")
    assert shown.endswith("x at 3")
    assert len(shown) < BRIEF_LENGTH + 10
    assert brief("abcdef", 3) == "ab [...] f"
