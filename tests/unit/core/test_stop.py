"""The stop rules and their order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.core.core_parts import make_request
from trio_engine.core.stop import REPETITION_STOP_REASON, StopDecision, check_stop
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RepetitionDetectionParams

pytestmark = pytest.mark.known_fault(kind="lost-stop-rule")

EOS, STOP, PLAIN = 2, 9, 50
LENGTH: StopDecision = (FinishReason.LENGTH, None)
REPETITION: StopDecision = (FinishReason.REPETITION, REPETITION_STOP_REASON)


def decide(
    output: list[int], *, prompt: list[int] | int = 3, **options: Any
) -> StopDecision | None:
    """The decision after the last token of ``output``."""
    request = make_request(prompt=prompt, **options)
    request.token_ids.extend(output)
    return check_stop(request, output[-1])


def test_a_plain_token_goes_on() -> None:
    assert decide([PLAIN], eos_token_id=EOS, stop_token_ids=[STOP]) is None


def test_the_end_token_stops_without_a_stop_reason() -> None:
    assert decide([EOS], eos_token_id=EOS) == (FinishReason.STOP, None)


def test_a_stop_id_is_told_as_the_stop_reason() -> None:
    assert decide([STOP], stop_token_ids=[7, STOP]) == (FinishReason.STOP, STOP)


def test_the_end_token_comes_before_stop_ids() -> None:
    assert decide([EOS], eos_token_id=EOS, stop_token_ids=[EOS]) == (FinishReason.STOP, None)


def test_without_an_end_token_no_id_is_one() -> None:
    """A client that ignores the end token leaves it out; ``ignore_eos`` itself decides nothing."""
    assert decide([EOS], eos_token_id=None, ignore_eos=True) is None
    assert decide([STOP], ignore_eos=True, stop_token_ids=[STOP]) == (FinishReason.STOP, STOP)
    assert decide([EOS], ignore_eos=True, eos_token_id=EOS) == (FinishReason.STOP, None)


def test_ids_that_only_the_sampler_masks_do_not_stop() -> None:
    assert decide([EOS], all_stop_token_ids={EOS, 3}) is None


@pytest.mark.parametrize("token", [EOS, STOP])
def test_before_min_tokens_nothing_but_length_stops(token: int) -> None:
    options: dict[str, Any] = {"eos_token_id": EOS, "stop_token_ids": [STOP], "min_tokens": 4}
    assert decide([PLAIN, PLAIN, token], **options) is None
    decision = decide([PLAIN, PLAIN, PLAIN, token], **options)
    assert decision is not None
    assert decision[0] is FinishReason.STOP


def test_max_tokens_ends_with_length() -> None:
    assert decide([PLAIN] * 4, max_tokens=5) is None
    assert decide([PLAIN] * 5, max_tokens=5) == LENGTH


def test_max_model_len_ends_with_length() -> None:
    assert decide([PLAIN] * 6, max_tokens=50, max_model_len=10) is None
    assert decide([PLAIN] * 7, max_tokens=50, max_model_len=10) == LENGTH


def test_max_model_len_holds_below_min_tokens_too() -> None:
    """There a request of vLLM 0.25.1 sticks for ever."""
    assert decide([PLAIN] * 7, max_tokens=50, min_tokens=40, max_model_len=10) == LENGTH


def test_a_stop_token_at_the_last_place_is_stop_and_not_length() -> None:
    assert decide([PLAIN, EOS], max_tokens=2, eos_token_id=EOS) == (FinishReason.STOP, None)
    assert decide([PLAIN, STOP], max_tokens=2, stop_token_ids=[STOP]) == (FinishReason.STOP, STOP)


def test_min_tokens_equal_to_max_tokens_may_stop_at_the_last_place_only() -> None:
    options: dict[str, Any] = {"min_tokens": 2, "max_tokens": 2, "eos_token_id": EOS}
    assert decide([EOS], **options) is None
    assert decide([EOS, EOS], **options) == (FinishReason.STOP, None)
    assert decide([EOS, PLAIN], **options) == LENGTH


def repeats(
    output: list[int], largest: int, smallest: int, min_count: int, **options: Any
) -> StopDecision | None:
    detection = RepetitionDetectionParams(
        max_pattern_size=largest, min_pattern_size=smallest, min_count=min_count
    )
    return decide(output, repetition_detection=detection, max_tokens=60, **options)


@pytest.mark.parametrize(
    ("output", "largest", "smallest", "min_count", "stops"),
    [
        ([5, 5, 5], 1, 1, 3, True),
        ([5, 5], 1, 1, 3, False),
        ([4, 5, 5, 5], 1, 1, 3, True),
        ([5, 5, 4, 5], 1, 1, 3, False),
        ([5, 6, 5, 6], 2, 1, 2, True),
        ([5, 6, 5, 6], 2, 2, 2, True),
        ([5, 6, 5, 6], 1, 1, 2, False),
        ([5, 6, 5, 6], 3, 3, 2, False),
        ([6, 6, 5, 6], 2, 2, 2, False),
        ([9, 5, 6, 7, 5, 6, 7], 8, 1, 2, True),
        ([5, 6, 7, 5, 6, 7], 3, 0, 2, True),
        ([5, 5, 5, 5], 2, 2, 2, True),
    ],
)
def test_a_pattern_repeated_often_enough_at_the_end_stops(
    output: list[int], largest: int, smallest: int, min_count: int, stops: bool
) -> None:
    assert repeats(output, largest, smallest, min_count) == (REPETITION if stops else None)


@pytest.mark.parametrize(
    ("largest", "smallest", "min_count"), [(0, 0, 3), (-1, -1, 3), (2, 1, 1), (2, 1, 0), (1, 2, 2)]
)
def test_detection_that_asks_for_nothing_is_off(
    largest: int, smallest: int, min_count: int
) -> None:
    assert repeats([5, 5, 5, 5], largest, smallest, min_count) is None


def test_the_prompt_is_no_part_of_a_pattern() -> None:
    assert repeats([5], 1, 1, 2, prompt=[5, 5, 5]) is None
    assert repeats([5, 5], 1, 1, 2, prompt=[5, 5, 5]) == REPETITION
    assert repeats([5, 6], 2, 1, 2, prompt=[5, 6, 5, 6]) is None


def test_repetition_waits_for_min_tokens_and_comes_after_length() -> None:
    assert repeats([5, 5], 1, 1, 2, min_tokens=3) is None
    assert repeats([5, 5, 5], 1, 1, 2, min_tokens=3) == REPETITION
    assert repeats([5] * 7, 1, 1, 2, max_model_len=10) == LENGTH


@pytest.mark.parametrize(("largest", "min_count"), [(2**62, 2), (2**62, 2**62), (3, 2**62)])
def test_a_pattern_size_beyond_all_bounds_costs_no_time(largest: int, min_count: int) -> None:
    """One request must not hold up the engine: only patterns that have room are looked at."""
    assert repeats([5, 6, 7], largest, 1, min_count) is None
