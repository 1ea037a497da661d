"""The null executor: known tokens, known time, no model."""

from __future__ import annotations

import time

import msgspec
import pytest

from trio_engine.config import EngineConfig
from trio_engine.core.plan import NO_TOKEN, DeviceCommand, NewRow, StepPlan
from trio_engine.errors import RequestError
from trio_engine.executor.null import (
    FIRST_TOKEN_ID,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    NullExecutor,
    modelless_properties,
    null_token,
)
from trio_engine.sampling_params import SamplingParams


def make_executor(*, null_step_ms: float = 0.0) -> NullExecutor:
    executor = NullExecutor(
        EngineConfig(executor="null", max_num_seqs=4, null_step_ms=null_step_ms)
    )
    executor.load()
    return executor


def make_row(slot: int, prompt: list[int], output: list[int], num_computed_tokens: int) -> NewRow:
    return NewRow(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=num_computed_tokens,
        block_ids=[],
        sampling_params=SamplingParams(),
    )


def run(executor: NullExecutor, plan: StepPlan) -> list[int]:
    executor.launch(plan)
    result = executor.collect()
    assert result.plan_id == plan.plan_id
    return result.token_ids


def decode(plan_id: int, *slots: int) -> StepPlan:
    return StepPlan(plan_id=plan_id, slots=slots, num_scheduled_tokens=[1] * len(slots))


def test_tokens_follow_from_the_prompt_and_the_position() -> None:
    prompt = [3, 4]
    assert null_token(prompt, 0) == FIRST_TOKEN_ID + 7
    assert null_token(prompt, 5) == FIRST_TOKEN_ID + 12


@pytest.mark.parametrize("prompt_sum", [0, 48_999, 49_000, 10**9])
def test_tokens_are_ids_of_the_vocabulary_and_no_special_ones(prompt_sum: int) -> None:
    assert FIRST_TOKEN_ID <= null_token([prompt_sum], 0) < VOCAB_SIZE


def test_a_prompt_then_each_output_position_draws_its_token() -> None:
    executor = make_executor()
    prompt = [5, 6, 7]
    first = StepPlan(
        plan_id=0, slots=[2], num_scheduled_tokens=[3], new_rows=[make_row(2, prompt, [], 0)]
    )
    tokens = [run(executor, first), run(executor, decode(1, 2)), run(executor, decode(2, 2))]
    assert tokens == [[null_token(prompt, position)] for position in range(3)]


def test_a_chunk_of_a_prompt_draws_nothing() -> None:
    executor = make_executor()
    prompt = [5, 6, 7]
    first = StepPlan(
        plan_id=0, slots=[0], num_scheduled_tokens=[2], new_rows=[make_row(0, prompt, [], 0)]
    )
    assert run(executor, first) == [NO_TOKEN]
    assert run(executor, decode(1, 0)) == [null_token(prompt, 0)]


def test_a_replayed_row_goes_on_where_its_output_ended() -> None:
    executor = make_executor()
    prompt = [5, 6]
    output = [null_token(prompt, 0), null_token(prompt, 1)]
    replay = StepPlan(
        plan_id=0, slots=[0], num_scheduled_tokens=[4], new_rows=[make_row(0, prompt, output, 0)]
    )
    assert run(executor, replay) == [null_token(prompt, 2)]


def test_a_row_may_start_with_tokens_computed_already() -> None:
    executor = make_executor()
    plan = StepPlan(
        plan_id=0, slots=[0], num_scheduled_tokens=[1], new_rows=[make_row(0, [5, 6], [], 1)]
    )
    assert run(executor, plan) == [null_token([5, 6], 0)]


def test_a_slot_s_next_row_starts_anew_and_its_neighbour_goes_on() -> None:
    executor = make_executor()
    rows = [make_row(0, [5], [], 0), make_row(1, [9, 9], [], 0)]
    run(executor, StepPlan(plan_id=0, slots=[0, 1], num_scheduled_tokens=[1, 2], new_rows=rows))
    tokens = run(
        executor,
        StepPlan(
            plan_id=1,
            slots=[1, 0],
            num_scheduled_tokens=[1, 1],
            finished_slots=[0],
            new_rows=[make_row(0, [8], [], 0)],
        ),
    )
    assert tokens == [null_token([9, 9], 1), null_token([8], 0)]


def test_plans_launched_are_collected_in_order() -> None:
    executor = make_executor()
    executor.launch(
        StepPlan(plan_id=0, slots=[0], num_scheduled_tokens=[1], new_rows=[make_row(0, [5], [], 0)])
    )
    executor.launch(decode(1, 0))
    assert [executor.collect().plan_id for _ in range(2)] == [0, 1]


def test_tokens_are_plain_integers_that_the_wire_can_encode() -> None:
    executor = make_executor()
    plan = StepPlan(
        plan_id=0, slots=[0], num_scheduled_tokens=[1], new_rows=[make_row(0, [5], [], 0)]
    )
    assert [type(token) for token in run(executor, plan)] == [int]


def test_a_step_takes_its_time() -> None:
    executor = make_executor(null_step_ms=20.0)
    plan = StepPlan(
        plan_id=0, slots=[0], num_scheduled_tokens=[1], new_rows=[make_row(0, [5], [], 0)]
    )
    start = time.monotonic()
    executor.launch(plan)
    executor.collect()
    assert time.monotonic() - start >= 0.02


def test_there_is_nothing_to_give_back_in_sleep() -> None:
    executor = make_executor()
    for method in ("sleep", "wake_up"):
        executor.command(DeviceCommand(command_id=1, method=method, args=(["kv_cache"],)))


def test_a_dummy_batch_takes_a_steps_time() -> None:
    executor = NullExecutor(EngineConfig(executor="null", null_step_ms=20))
    start = time.monotonic()
    executor.command(DeviceCommand(command_id=1, method="execute_dummy_batch"))
    assert time.monotonic() - start >= 0.02


def test_no_other_command_is_known() -> None:
    with pytest.raises(RequestError, match="no method 'echo'"):
        make_executor().command(DeviceCommand(command_id=1, method="echo"))


def test_shutdown_may_follow_no_load() -> None:
    NullExecutor(EngineConfig(executor="null")).shutdown()


def test_what_is_announced_follows_the_options() -> None:
    config = EngineConfig(max_model_len=100, block_size=16, max_num_seqs=3)
    properties = modelless_properties(config)
    assert (properties.vocab_size, properties.max_model_len) == (VOCAB_SIZE, 100)
    assert (properties.block_size, properties.num_blocks) == (16, 21)
    assert modelless_properties(EngineConfig(num_blocks=5)).num_blocks == 5
    assert modelless_properties(EngineConfig()).max_model_len == MAX_MODEL_LEN


def test_a_batch_that_goes_on_decoding_draws_what_new_batches_would() -> None:
    """A plan that shares its lists with the one before says that it is the same batch."""
    executor = make_executor()
    prompts = {0: [VOCAB_SIZE - FIRST_TOKEN_ID - 4], 1: [5, 6], 2: [1, 2, 3]}
    rows = [make_row(slot, prompt, [], 0) for slot, prompt in prompts.items()]
    sizes = [len(prompt) for prompt in prompts.values()]
    plan = StepPlan(plan_id=0, slots=[0, 1, 2], num_scheduled_tokens=sizes, new_rows=rows)
    outputs: dict[int, list[int]] = {slot: [] for slot in prompts}

    def take(plan: StepPlan) -> None:
        for slot, token_id in zip(plan.slots, run(executor, plan), strict=True):
            outputs[slot].append(token_id)

    take(plan)
    for plan_id, slots in enumerate([[0, 1, 2], [0, 1], [2, 0, 1]], 1):
        shared = decode(plan_id, *slots)
        for _ in range(5):
            take(shared)
    for slot, output in outputs.items():
        assert output == [null_token(prompts[slot], i) for i in range(len(output))]
    assert NO_TOKEN not in outputs[0]
    assert FIRST_TOKEN_ID in outputs[0]  # it came round the end of the vocabulary


def test_a_plan_without_rows_draws_nothing() -> None:
    assert run(make_executor(), StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[])) == []


def test_a_chunk_of_one_token_draws_none_however_often() -> None:
    executor = make_executor()
    chunk = StepPlan(plan_id=0, slots=[0], num_scheduled_tokens=[1])
    first = msgspec.structs.replace(chunk, new_rows=[make_row(0, [1, 2, 3], [], 0)])
    assert run(executor, first) == [NO_TOKEN]
    assert run(executor, chunk) == [NO_TOKEN]
    assert run(executor, chunk) == [null_token([1, 2, 3], 0)]
    assert run(executor, chunk) == [null_token([1, 2, 3], 1)]
