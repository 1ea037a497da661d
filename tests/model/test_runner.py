"""The runner: deltas of plans, mixed batches, rows that come, go and come again."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.model.decoding import CPU, GREEDY, Collecting, PlanDriver, load_decoder, new_row
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.core.plan import StepPlan
from trio_engine.errors import RequestStepError, StepError
from trio_engine.model.kv_cache import KVCache, KVCacheShape
from trio_engine.model.runner import ModelRunner
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trio_engine.model.decoder import Decoder

BLOCK_SIZE = 4
NUM_BLOCKS = 200
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 21, [100, 3, 100], list(range(60, 125))]
SEEDED = [SamplingParams(seed=seed, max_tokens=None) for seed in range(5)]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder, _ = make_hf_folder("qwen3", tmp_path_factory.mktemp("qwen3"))
    return load_decoder(ModelFiles("folder", folder))


@pytest.fixture(params=[False, True], ids=["settled", "ahead"])
def runner(decoder: Decoder, request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(decoder, launches_ahead=request.param)


def make_runner(decoder: Decoder, *, launches_ahead: bool = False) -> ModelRunner:
    shape = KVCacheShape.of(decoder.config, BLOCK_SIZE, decoder.dtype)
    cache = KVCache(shape, NUM_BLOCKS, CPU, decoder.dtype)
    return ModelRunner(
        decoder, cache, max_num_seqs=8, max_model_len=128, launches_ahead=launches_ahead
    )


def drive(runner: ModelRunner, seed: int = 0) -> PlanDriver:
    return PlanDriver(Collecting(runner), NUM_BLOCKS, BLOCK_SIZE, seed)


def alone(decoder: Decoder, prompt: list[int], params: SamplingParams, num: int) -> list[int]:
    return drive(make_runner(decoder)).generate([prompt], [params], num)[0]


@pytest.mark.parametrize("chunk", [1 << 30, 5, 1])
@pytest.mark.parametrize("params", [[GREEDY] * 5, SEEDED, [*SEEDED[:3], GREEDY, GREEDY]])
def test_requests_together_give_what_each_gives_alone(
    runner: ModelRunner, decoder: Decoder, params: list[SamplingParams], chunk: int
) -> None:
    together = drive(runner, seed=chunk).generate(PROMPTS, params, 12, chunk)
    assert together == [alone(decoder, p, o, 12) for p, o in zip(PROMPTS, params, strict=True)]


def test_a_plan_launched_ahead_takes_the_token_that_nobody_has_seen(decoder: Decoder) -> None:
    driver = drive(make_runner(decoder, launches_ahead=True))
    for slot in (0, 1):
        driver.add(slot, PROMPTS[slot], SEEDED[slot], room=10)
    plans = [{0: 3, 1: 37}, {1: 1, 0: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}]
    outputs: dict[int, list[int]] = {0: [], 1: []}
    driver.launch(plans[0])
    for earlier, plan in pairwise(plans):
        driver.launch(plan)
        for slot, token_id in driver.collect(earlier).items():
            outputs[slot].append(token_id)
    for slot, token_id in driver.collect(plans[-1]).items():
        outputs[slot].append(token_id)
    assert outputs == {s: alone(decoder, PROMPTS[s], SEEDED[s], 4) for s in (0, 1)}


def test_a_late_token_does_not_reach_the_slots_next_row(decoder: Decoder) -> None:
    driver = drive(make_runner(decoder, launches_ahead=True))
    driver.add(0, PROMPTS[0], SEEDED[0], room=9)
    driver.launch({0: 3})
    driver.finish(0)
    driver.add(0, PROMPTS[1], SEEDED[1], room=9)
    driver.launch({0: 30})
    driver.collect({0: 3})
    assert driver.collect({0: 30}) == {}
    tokens = [driver.step({0: count})[0] for count in (7, 1, 1)]
    assert tokens == alone(decoder, PROMPTS[1], SEEDED[1], 3)


def test_slots_and_blocks_are_used_again(runner: ModelRunner, decoder: Decoder) -> None:
    driver = drive(runner)
    for _ in range(12):  # more blocks in all than there are
        assert driver.generate(PROMPTS, SEEDED, 3)[4] == alone(decoder, PROMPTS[4], SEEDED[4], 3)


def test_a_preempted_row_goes_on_where_it_was(runner: ModelRunner, decoder: Decoder) -> None:
    """Set up again with prompt and output: the next draw is that of its output position."""
    whole = alone(decoder, PROMPTS[2], SEEDED[2], 9)
    driver = drive(runner)
    driver.add(3, PROMPTS[2] + whole[:5], SEEDED[2], room=9, num_prompt_tokens=len(PROMPTS[2]))
    tokens = [driver.step({3: count}).get(3) for count in (11, 15, 1, 1, 1)]
    assert tokens == [None, *whole[5:]]


def test_a_cached_prefix_is_not_computed_again(runner: ModelRunner, decoder: Decoder) -> None:
    executor = Collecting(runner)
    prompt = PROMPTS[1]
    first = new_row(0, prompt, list(range(10)), SEEDED[1])
    second = new_row(1, prompt, [*range(8), 10, 11], SEEDED[1], num_computed_tokens=32)
    plan = StepPlan(plan_id=0, slots=[0], num_scheduled_tokens=[37], new_rows=[first])
    executor.launch(plan)
    plan = StepPlan(plan_id=1, slots=[1], num_scheduled_tokens=[5], new_rows=[second])
    executor.launch(plan)
    results = [executor.collect().token_ids for _ in range(2)]
    assert results[0] == results[1] == alone(decoder, prompt, SEEDED[1], 1)


def test_a_reset_drops_every_row(runner: ModelRunner, decoder: Decoder) -> None:
    driver = drive(runner)
    for slot in range(5):
        driver.add(slot, PROMPTS[slot], SEEDED[slot], room=5)
    driver.step({0: 3, 1: 9})
    driver.reset()
    driver.add(1, PROMPTS[0], SEEDED[0], room=5)
    assert driver.step({1: 3}) == {1: alone(decoder, PROMPTS[0], SEEDED[0], 1)[0]}
    with pytest.raises(StepError, match="do not all hold a row"):
        driver.step({0: 1})


def test_blocks_may_come_one_by_one(runner: ModelRunner, decoder: Decoder) -> None:
    executor = Collecting(runner)
    row = new_row(6, PROMPTS[0], [7], SEEDED[0])
    tokens: list[int] = []
    for plan_id, count in enumerate([3, 1, 1, 1, 1, 1]):
        plan = StepPlan(plan_id=plan_id, slots=[6], num_scheduled_tokens=[count])
        if plan_id == 0:
            plan.new_rows = [row]
        if len(tokens) in (2, 6):
            plan.new_block_ids = [(6, [100 - plan_id])]
        executor.launch(plan)
        tokens += executor.collect().token_ids
    assert tokens == alone(decoder, PROMPTS[0], SEEDED[0], 6)


def test_a_poisoned_row_does_not_reach_the_next_owner_of_its_blocks(decoder: Decoder) -> None:
    shape = KVCacheShape.of(decoder.config, BLOCK_SIZE, decoder.dtype)
    cache = KVCache(shape, 20, CPU, decoder.dtype)
    for layer in range(shape.num_layers):
        cache.write(layer, torch.arange(80), torch.full((80, 2, 2, 32), torch.nan))
    runner = ModelRunner(decoder, cache, max_num_seqs=4, max_model_len=64, launches_ahead=False)
    driver = PlanDriver(Collecting(runner), 20, BLOCK_SIZE)
    assert driver.generate(PROMPTS[:1], [GREEDY], 5)[0] == alone(decoder, PROMPTS[0], GREEDY, 5)


def test_nans_are_reported_by_slot(decoder: Decoder) -> None:
    runner = make_runner(decoder)
    executor = Collecting(runner)
    rows = [new_row(2, [5], [0], GREEDY), new_row(4, [6], [1], GREEDY)]
    plan = StepPlan(plan_id=0, slots=[4, 2], num_scheduled_tokens=[1, 1], new_rows=rows)
    executor.launch(plan)
    assert executor.collect().num_nans_in_logits is None
    embedding = decoder._weights.embedding
    kept = embedding[6].clone()
    embedding[6] = torch.nan
    executor.launch(StepPlan(plan_id=1, slots=[], num_scheduled_tokens=[], reset=True))
    executor.collect()
    executor.launch(plan)
    result = executor.collect()
    embedding[6] = kept
    assert result.num_nans_in_logits == {4: decoder.config.vocab_size}
    assert 0 <= result.token_ids[0] < decoder.config.vocab_size


def _plan(slots: Any = (), counts: Any = (), **changes: Any) -> StepPlan:
    return StepPlan(plan_id=0, slots=slots, num_scheduled_tokens=counts, **changes)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (_plan([1], [1]), "do not all hold a row"),
        (_plan([8], [1]), "do not all hold a row"),
        (_plan([-1], [1]), "do not all hold a row"),
        (_plan([0, 0], [1, 1]), "not distinct"),
        (_plan([0], [1, 1]), "not one per count"),
        (_plan([0], [0]), "0 tokens are scheduled"),
        (_plan([0], [8]), "8 tokens are scheduled after 0 of 7, with 2 blocks"),
        (_plan([0], [1], finished_slots=[3]), "slot 3 holds no row"),
        (_plan([0], [1], new_block_ids=[(5, [1])]), "slot 5 holds no row"),
        (_plan([0], [1], new_block_ids=[(0, [NUM_BLOCKS])]), "no such blocks"),
        (_plan([0], [1], new_block_ids=[(0, [-1])]), "no such blocks"),
        (_plan([0], [1], new_block_ids=[(0, [2] * 40)]), "more than max_model_len needs"),
        (_plan(new_rows=[new_row(8, [1], [1], GREEDY)]), "1 tokens in slot 8"),
        (_plan(new_rows=[new_row(1, [], [1], GREEDY)]), "0 tokens in slot 1"),
        (_plan(new_rows=[new_row(1, [1] * 129, [1], GREEDY)]), "129 tokens in slot 1"),
        (_plan(new_rows=[new_row(1, [1], [1], GREEDY, num_computed_tokens=1)]), "1 are computed"),
        (_plan([1], [2], new_rows=[new_row(1, [1] * 5, [], GREEDY)]), "with 0 blocks"),
    ],
)
def test_a_plan_that_contradicts_the_rows_is_a_step_error(
    decoder: Decoder, plan: StepPlan, message: str
) -> None:
    runner = make_runner(decoder)
    runner.launch(_plan(new_rows=[new_row(0, [1] * 7, [4, 5], GREEDY)]))
    with pytest.raises(StepError, match=message):
        runner.launch(plan)


@pytest.mark.known_fault(kind="token-out-of-range")
@pytest.mark.parametrize("token_id", [-1, 128, 2**40])
def test_token_ids_outside_the_vocabulary_are_their_rows_fault(
    decoder: Decoder, token_id: int
) -> None:
    runner = make_runner(decoder)
    rows = [new_row(0, [3], [0], GREEDY), new_row(2, [3, token_id], [1], GREEDY)]
    with pytest.raises(RequestStepError, match="request-2: token ids outside 0-127") as caught:
        runner.launch(_plan([0, 2], [1, 2], new_rows=rows))
    assert caught.value.slots == (2,)
    again = _plan([0], [1], reset=True, finished_slots=[2], new_rows=rows[:1])
    assert runner.launch(again).settle().token_ids == alone(decoder, [3], GREEDY, 1)


def test_a_row_does_not_outgrow_max_model_len(decoder: Decoder) -> None:
    driver = drive(make_runner(decoder))
    driver.add(0, [5] * 127, GREEDY, room=2)
    driver.step({0: 127})
    driver.step({0: 1})  # the one token that a pipeline may waste
    with pytest.raises(StepError, match="beyond max_model_len"):
        driver.step({0: 1})


def test_memory_that_runs_out_is_a_step_error(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")

    runner = make_runner(decoder)
    monkeypatch.setattr(decoder, "forward", exhausted)
    with pytest.raises(StepError, match="out of memory while computing 1 tokens"):
        runner.launch(_plan([0], [1], new_rows=[new_row(0, [1], [1], GREEDY)]))
