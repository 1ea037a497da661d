"""The core under workloads and orders of moves that Hypothesis draws, so that a failure shrinks.

A failing example ends as a few short requests, few moves and small limits; what the moves leave
is finished in the plainest order.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from tests.stateful.core_workloads import (
    VOCAB_SIZE,
    Workload,
    WorkloadRun,
    make_config,
    make_request,
)


def make_prompt(first_and_length: tuple[int, int]) -> list[int]:
    first, length = first_and_length
    return [(first + position * position) % VOCAB_SIZE for position in range(length)]


# Few kinds of limits, the tight ones first: that is where requests get in each other's way.
CONFIGS = st.builds(
    make_config,
    max_model_len=st.sampled_from([8, 20, 48]),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_full_requests=st.sampled_from([1, 1, 1, 3]),
    num_more_blocks=st.integers(0, 2),
    max_num_seqs=st.sampled_from([2, 3, 8, 1]),
    max_num_batched_tokens=st.sampled_from([64, 8, 3, 1]),
    pipeline_depth=st.sampled_from([2, 1]),
)
REQUEST_OPTIONS = st.fixed_dictionaries(
    {
        "prompt": st.tuples(st.integers(0, VOCAB_SIZE - 1), st.integers(1, 7)).map(make_prompt),
        "max_tokens": st.sampled_from([1, 2, 5, 20, 45, 45]),
        "min_tokens": st.integers(0, 3),
        "stops": st.sampled_from([False, False, True]),
        "eos": st.sampled_from([False, False, True]),
    }
)
MOVES_OF_A_ROW = ["abort", "fail_launch", "fail_collect"]
# Those that keep the pipeline full are drawn more often.
MOVES = st.sampled_from(
    [
        *["schedule", "launch", "collect"] * 4,
        *["add", "add", "receive", "pause", "resume", "preempt_all"],
        *MOVES_OF_A_ROW,
    ]
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    options: list[dict[str, Any]] = draw(st.lists(REQUEST_OPTIONS, min_size=1, max_size=10))
    return Workload(
        config=draw(CONFIGS),
        launches_ahead=draw(st.booleans()),
        requests=[make_request(index, **values) for index, values in enumerate(options)],
    )


@given(workloads(), st.lists(st.tuples(MOVES, st.integers(0, 7)), max_size=150))
def test_tokens_equal_a_solo_run_in_any_order_of_moves(
    workload: Workload, moves: list[tuple[str, int]]
) -> None:
    run = WorkloadRun(workload)
    for move, index in moves:
        if move in MOVES_OF_A_ROW:
            getattr(run, move)(index)
        else:
            getattr(run, move)()
    run.finish()
    run.check_against_solo()
