"""The KV-checking executor finds every mistake in plans, rows and blocks; else it is no oracle."""

from __future__ import annotations

from typing import Any

import pytest

from trio_engine.config import EngineConfig
from trio_engine.core.plan import NO_TOKEN, DeviceCommand, NewRow, StepPlan
from trio_engine.errors import RequestError, StepError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.executor.null import VOCAB_SIZE
from trio_engine.requests import LoRARequest
from trio_engine.sampling_params import SamplingParams

BLOCK_SIZE = 2


def make_executor(
    *, launches_ahead: bool = False, vocab_size: int | None = 100
) -> KVCheckingExecutor:
    """Eight blocks of two tokens, four slots."""
    config = EngineConfig(
        executor="kv-checking",
        max_num_seqs=4,
        enable_lora=True,
        block_size=BLOCK_SIZE,
        num_blocks=8,
    )
    return KVCheckingExecutor(config, launches_ahead=launches_ahead, vocab_size=vocab_size)


def make_row(slot: int, token_ids: list[int], block_ids: list[int], **changes: Any) -> NewRow:
    values: dict[str, Any] = {
        "slot": slot,
        "request_id": f"r{slot}",
        "token_ids": token_ids,
        "num_prompt_tokens": len(token_ids),
        "num_computed_tokens": 0,
        "block_ids": block_ids,
        "sampling_params": SamplingParams(),
    }
    return NewRow(**(values | changes))


def adapter(lora_id: int) -> LoRARequest | None:
    return LoRARequest(f"a{lora_id}", lora_id) if lora_id else None


def make_plan(plan_id: int, *rows: tuple[int, int], **changes: Any) -> StepPlan:
    """A plan over (slot, number of tokens) rows."""
    slots, num_tokens = [list(column) for column in zip(*rows, strict=True)] or ([], [])
    return StepPlan(plan_id=plan_id, slots=slots, num_scheduled_tokens=num_tokens, **changes)


def run(executor: KVCheckingExecutor, plan: StepPlan) -> list[int]:
    executor.launch(plan)
    result = executor.collect()
    assert result.plan_id == plan.plan_id
    return result.token_ids


def start(executor: KVCheckingExecutor, slot: int = 0, plan_id: int = 0) -> int:
    """A row of three tokens in blocks 0 and 1; returns its first token."""
    row = make_row(slot, [5, 6, 7], [0, 1])
    (token_id,) = run(executor, make_plan(plan_id, (slot, 3), new_rows=[row]))
    return token_id


def refusal(executor: KVCheckingExecutor, plan: StepPlan) -> str:
    with pytest.raises(StepError) as caught:
        executor.launch(plan)
    return str(caught.value)


# What it draws


def test_tokens_follow_from_the_history_alone() -> None:
    """Not from slot, blocks, chunks or neighbours."""
    plain = make_executor()
    tokens = [start(plain), *run(plain, make_plan(1, (0, 1)))]
    other = make_executor()
    rows = [make_row(3, [5, 6, 7], [7, 2]), make_row(1, [9], [4])]
    assert run(other, make_plan(0, (3, 2), (1, 1), new_rows=rows))[0] == NO_TOKEN
    assert run(other, make_plan(1, (1, 1), (3, 1)))[1] == tokens[0]
    assert run(other, make_plan(2, (3, 1))) == [tokens[1]]
    assert all(0 <= token < 100 for token in tokens)


def test_another_history_or_adapter_draws_other_tokens() -> None:
    drawn = set()
    for prompt, lora_id in (([5, 6, 7], 0), ([6, 5, 7], 0), ([5, 6], 0), ([5, 6, 7], 1)):
        executor = make_executor(vocab_size=10**9)
        row = make_row(0, prompt, [0, 1], lora_request=adapter(lora_id))
        drawn.update(run(executor, make_plan(0, (0, len(prompt)), new_rows=[row])))
    assert len(drawn) == 4


def test_a_replay_draws_the_same_next_token() -> None:
    executor = make_executor()
    first = start(executor)
    (second,) = run(executor, make_plan(1, (0, 1)))
    replay = make_row(0, [5, 6, 7, first], [6, 7], num_prompt_tokens=3)
    plan = make_plan(2, (0, 4), finished_slots=[0], new_rows=[replay])
    assert run(executor, plan) == [second]


def test_a_cache_hit_of_a_full_block_is_read_and_not_computed() -> None:
    executor = make_executor()
    first = start(executor)
    row = make_row(1, [5, 6, 7], [0, 2], num_computed_tokens=2)
    assert run(executor, make_plan(1, (1, 1), new_rows=[row])) == [first]


def test_the_vocabulary_is_that_of_all_executors_without_a_model_if_not_given() -> None:
    assert make_executor(vocab_size=None).load().vocab_size == VOCAB_SIZE
    assert make_executor(vocab_size=7).load().vocab_size == 7


# What it refuses


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_more_plans_uncollected_than_it_asked_for(launches_ahead: bool) -> None:
    executor = make_executor(launches_ahead=launches_ahead)
    row = make_row(0, [5], [0, 1])
    executor.launch(make_plan(0, (0, 1), new_rows=[row]))
    if launches_ahead:
        executor.launch(make_plan(1, (0, 1)))
        assert refusal(executor, make_plan(2, (0, 1))) == "plan 2 launched over 2 others"
    else:
        assert refusal(executor, make_plan(1, (0, 1))) == "plan 1 launched over 1 others"


@pytest.mark.parametrize("plan_id", [0, 2])
def test_a_plan_out_of_order(plan_id: int) -> None:
    executor = make_executor()
    start(executor)
    assert refusal(executor, make_plan(plan_id, (0, 1))) == f"plan {plan_id} came instead of 1"


def test_a_reset_may_skip_plans_but_not_go_back() -> None:
    executor = make_executor()
    start(executor)
    row = make_row(0, [5], [0])
    assert "came instead of 1" in refusal(
        executor, make_plan(0, (0, 1), reset=True, new_rows=[row])
    )
    run(executor, make_plan(5, (0, 1), reset=True, new_rows=[row]))
    run(executor, make_plan(6, (0, 1), reset=True, new_rows=[row]))
    assert "came instead of 7" in refusal(executor, make_plan(8, (0, 1)))


def test_a_reset_drops_all_rows() -> None:
    executor = make_executor()
    start(executor)
    row = make_row(1, [5], [0])
    run(executor, make_plan(1, (1, 1), reset=True, new_rows=[row]))
    assert refusal(executor, make_plan(2, (0, 1))) == "slot 0 has no row"


def test_the_end_of_a_row_that_is_not_there() -> None:
    executor = make_executor()
    plan = make_plan(0, (0, 1), finished_slots=[0], new_rows=[make_row(0, [5], [0])])
    assert refusal(executor, plan) == "plan 0 finishes slot 0, which has no row"


def test_a_row_set_up_over_a_live_one() -> None:
    executor = make_executor()
    start(executor)
    plan = make_plan(1, (0, 1), new_rows=[make_row(0, [5], [0])])
    assert refusal(executor, plan) == "plan 1 sets up slot 0 over a live row"


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_is_none(slot: int) -> None:
    plan = make_plan(0, (slot, 1), new_rows=[make_row(slot, [5], [0])])
    assert refusal(make_executor(), plan) == f"plan 0 names slot {slot}"


@pytest.mark.parametrize(("token_ids", "num_prompt_tokens"), [([5], 2), ([], 0)])
def test_a_row_without_its_prompt(token_ids: list[int], num_prompt_tokens: int) -> None:
    row = make_row(0, token_ids, [0], num_prompt_tokens=num_prompt_tokens)
    plan = make_plan(0, (0, 1), new_rows=[row])
    assert refusal(make_executor(), plan) == "row of 'r0' lacks prompt tokens"


def test_a_slot_named_twice() -> None:
    executor = make_executor()
    start(executor)
    assert refusal(executor, make_plan(1, (0, 1), (0, 1))) == "plan 1 names slots [0, 0]"


def test_a_plan_without_rows() -> None:
    plan = StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[])
    assert refusal(make_executor(), plan) == "plan 0 names slots []"


def test_blocks_for_a_row_that_is_not_there() -> None:
    executor = make_executor()
    start(executor)
    plan = make_plan(1, (0, 1), new_block_ids=[(3, [4])])
    assert refusal(executor, plan) == "slot 3 has no row"


def test_fewer_tokens_than_one_or_more_than_are_known() -> None:
    for num_tokens in (0, 4):
        plan = make_plan(0, (0, num_tokens), new_rows=[make_row(0, [5, 6, 7], [0, 1])])
        assert refusal(make_executor(), plan) == f"{num_tokens} tokens after 0 of 3 known"


def test_a_token_beyond_the_block_table() -> None:
    executor = make_executor()
    start(executor)
    run(executor, make_plan(1, (0, 1)))
    assert refusal(executor, make_plan(2, (0, 1))) == "position 4 is beyond 2 blocks"


def test_new_blocks_are_appended_to_the_table() -> None:
    executor = make_executor()
    start(executor)
    run(executor, make_plan(1, (0, 1)))
    run(executor, make_plan(2, (0, 1), new_block_ids=[(0, [2])]))
    run(executor, make_plan(3, (0, 1)))
    assert refusal(executor, make_plan(4, (0, 1))) == "position 6 is beyond 3 blocks"


@pytest.mark.parametrize("block_id", [-1, 8])
def test_a_block_that_is_none(block_id: int) -> None:
    plan = make_plan(0, (0, 1), new_rows=[make_row(0, [5], [block_id])])
    assert refusal(make_executor(), plan) == f"there is no block {block_id}"


def test_tokens_said_to_be_computed_that_nobody_wrote() -> None:
    row = make_row(0, [5, 6, 7], [0, 1], num_computed_tokens=2)
    plan = make_plan(0, (0, 1), new_rows=[row])
    assert refusal(make_executor(), plan) == "position 0 reads slot 0, which nobody wrote"


def test_a_block_that_two_rows_write() -> None:
    executor = make_executor()
    start(executor)
    run(executor, make_plan(1, (1, 1), new_rows=[make_row(1, [9], [0])]))
    assert refusal(executor, make_plan(2, (0, 1))) == ("position 0 reads slot 0 with other content")


def test_a_cache_hit_with_the_right_tokens_after_a_wrong_beginning() -> None:
    """Real KV depends on all that stands before: the same tokens there are not enough."""
    executor = make_executor()
    rows = [make_row(0, [5, 6, 7, 8], [0, 1]), make_row(1, [9, 9, 7, 8], [2, 3])]
    run(executor, make_plan(0, (0, 4), (1, 4), new_rows=rows))
    hit = make_row(2, [5, 6, 7, 8, 1], [0, 3, 4], num_computed_tokens=4)
    assert refusal(executor, make_plan(1, (2, 1), new_rows=[hit])) == (
        "position 2 reads slot 6 with other content"
    )


def test_a_cache_hit_of_another_adapter() -> None:
    executor = make_executor()
    start(executor)
    hit = make_row(1, [5, 6, 7], [0, 2], num_computed_tokens=2, lora_request=adapter(1))
    assert "other content" in refusal(executor, make_plan(1, (1, 1), new_rows=[hit]))


def test_a_replay_with_a_wrong_token_computed_already() -> None:
    executor = make_executor()
    start(executor)
    replay = make_row(0, [5, 1, 7], [0, 1], num_computed_tokens=2)
    plan = make_plan(1, (0, 1), finished_slots=[0], new_rows=[replay])
    assert refusal(executor, plan) == "position 1 reads slot 1 with other content"


# Commands


def do(executor: KVCheckingExecutor, method: str, *args: Any) -> Any:
    return executor.command(DeviceCommand(command_id=1, method=method, args=args))


def test_no_command_may_overtake_a_plan_and_no_other_is_known() -> None:
    executor = make_executor()
    assert do(executor, "execute_dummy_batch") is None
    with pytest.raises(RequestError, match="no method 'echo'"):
        do(executor, "echo")
    executor.launch(make_plan(0, (0, 1), new_rows=[make_row(0, [5], [0])]))
    with pytest.raises(StepError, match="'sleep' overtook a plan"):
        do(executor, "sleep", ["kv_cache"])


def test_a_plan_while_memory_sleeps() -> None:
    executor = make_executor()
    do(executor, "sleep", ["kv_cache", "weights"])
    plan = make_plan(0, (0, 1), new_rows=[make_row(0, [5], [0])])
    assert refusal(executor, plan) == "plan 0, but memory sleeps: kv_cache, weights"
    with pytest.raises(RequestError, match=r"^memory sleeps: kv_cache, weights$"):
        do(executor, "execute_dummy_batch")
    do(executor, "wake_up", ["kv_cache"])
    assert refusal(executor, plan) == "plan 0, but memory sleeps: weights"
    do(executor, "wake_up", ["weights", "kv_cache"])
    run(executor, plan)


def test_a_block_that_was_written_before_the_kv_cache_slept() -> None:
    executor = make_executor()
    start(executor)
    do(executor, "sleep", ["kv_cache"])
    do(executor, "wake_up", ["kv_cache"])
    assert refusal(executor, make_plan(1, (0, 1))) == (
        "position 0 reads slot 0, which nobody wrote"
    )


def test_the_kv_cache_outlasts_a_sleep_of_the_weights_alone() -> None:
    executor = make_executor()
    start(executor)
    do(executor, "sleep", ["weights"])
    do(executor, "wake_up", ["weights"])
    run(executor, make_plan(1, (0, 1)))


def test_shutdown_may_follow_no_load() -> None:
    make_executor().shutdown()


def test_the_last_token_that_the_limits_allow_is_never_computed() -> None:
    executor = make_executor()
    row = make_row(0, [5, 6], [0, 1], sampling_params=SamplingParams(max_tokens=2))
    run(executor, make_plan(0, (0, 2), new_rows=[row]))
    run(executor, make_plan(1, (0, 1)))
    assert "computes token 3, the last" in refusal(executor, make_plan(2, (0, 1)))
