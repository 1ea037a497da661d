"""Log probabilities from an executor to a client: whole, in order, and only to who asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.core.core_parts import (
    VOCAB_SIZE,
    add,
    make_core,
    make_driver,
    make_request,
    make_source,
    plan_step,
)
from tests.unit.core.scheduler_parts import make_scheduler, schedule, settle
from trio_engine.config import EngineConfig
from trio_engine.core.logprobs import UnsentLogprobs
from trio_engine.core.outbox import FINISHED_ID_BYTES, Outbox
from trio_engine.core.plan import StepResult
from trio_engine.errors import StepError
from trio_engine.executor.made_up_logprobs import STEP
from trio_engine.outputs import FinishReason, LogprobsLists, LogprobsTensors
from trio_engine.tensors import TensorData
from trio_engine.testing.core_driver import CoreDriver
from trio_engine.testing.flaky_executor import FlakyExecutor
from trio_engine.testing.requests import make_core as make_core_for

if TYPE_CHECKING:
    from trio_engine.testing.core_driver import RequestLog
    from trio_engine.testing.flaky_executor import FaultMoment


def row(*ids: int) -> LogprobsLists:
    return LogprobsLists(
        np.array([ids], dtype=np.int32),
        -np.array([ids], dtype=np.float32),
        np.array([ids[0]], dtype=np.int64),
    )


def prompt_tensors(num_rows: int, width: int) -> LogprobsTensors:
    return LogprobsTensors(
        TensorData.from_numpy(np.zeros((num_rows, width), dtype=np.int32)),
        TensorData.from_numpy(np.zeros((num_rows, width), dtype=np.float32)),
        TensorData.from_numpy(np.zeros(num_rows, dtype=np.int64)),
    )


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(0, 0)


# In the outbox


def test_rows_of_one_entry_are_joined_in_order(outbox: Outbox) -> None:
    request, other = make_request("a"), make_request("b")
    for token_id in (5, 6, 7):
        outbox.append_logprobs(request, row(token_id, 1))
        outbox.append_token(request, token_id)
        outbox.append_token(other, token_id)
    outbox.finish(request, FinishReason.LENGTH)
    told, untold = outbox.take(0.0)[0].outputs
    assert told.new_logprobs is not None
    assert told.new_logprobs.logprob_token_ids.tolist() == [[5, 1], [6, 1], [7, 1]]
    assert told.new_logprobs.logprobs.tolist() == [[-5, -1], [-6, -1], [-7, -1]]
    assert told.new_logprobs.sampled_token_ranks.tolist() == [5, 6, 7]
    assert untold.new_logprobs is None


def test_each_entry_has_the_rows_of_its_own_tokens(outbox: Outbox) -> None:
    request = make_request("a")
    for token_id in (5, 6):
        outbox.append_logprobs(request, row(token_id))
        outbox.append_token(request, token_id)
        (output,) = outbox.take(0.0)[0].outputs
        assert output.new_logprobs is not None
        assert output.new_logprobs.logprob_token_ids.tolist() == [[token_id]]
    outbox.finish(request, FinishReason.ABORT)
    (output,) = outbox.take(0.0)[0].outputs
    assert output.new_logprobs is None


def test_the_first_prompt_logprobs_stay(outbox: Outbox) -> None:
    request, first = make_request("a"), prompt_tensors(2, 3)
    for tensors in (first, prompt_tensors(2, 3)):
        outbox.put_prompt_logprobs(request, tensors)
        outbox.append_token(request, 1)
    assert outbox.take(0.0)[0].outputs[0].new_prompt_logprobs_tensors is first


def test_a_drop_takes_exactly_the_bytes_of_log_probabilities_back(outbox: Outbox) -> None:
    outbox.append_logprobs(stays := make_request("stays"), row(1, 2))
    outbox.append_token(stays, 1)
    before = outbox.num_bytes
    for request_id in ("goes", "goes"):  # of a length that its finished id takes only once
        request = make_request(request_id)
        outbox.put_prompt_logprobs(request, prompt_tensors(100, 5))
        for token_id in (3, 4):
            outbox.append_logprobs(request, row(token_id, 2))
            outbox.append_token(request, token_id)
        assert outbox.num_bytes > before + 100 * 5 * 8
        outbox.drop(request)
        told = outbox.num_bytes - before
        assert told == FINISHED_ID_BYTES + len(request_id)
        outbox.drop(request)
        assert outbox.num_bytes == before + told
    (output,) = outbox.take(0.0)[0].outputs
    assert output.request_id == "stays"
    assert outbox.num_bytes == 0


def test_a_request_under_a_used_id_inherits_no_rows(outbox: Outbox) -> None:
    first, second = make_request("a"), make_request("a")
    outbox.append_logprobs(first, row(1))
    outbox.append_token(first, 1)
    outbox.drop(first)
    outbox.append_token(second, 2)
    (output,) = outbox.take(0.0)[0].outputs
    assert output.new_logprobs is None


def test_rows_count_towards_the_limit_by_their_size() -> None:
    outbox = Outbox(0, 0, limit_bytes=100_000)
    request = make_request("a")
    outbox.append_logprobs(request, row(*range(10_000)))
    assert not outbox.is_full
    outbox.append_logprobs(request, row(*range(10_000)))
    assert outbox.is_full


def test_no_rows_are_joined_to_none() -> None:
    assert UnsentLogprobs().joined() is None


# Through the core


def rows_heard(log: RequestLog) -> LogprobsLists:
    """All rows of a log, each entry checked to have one for each of its tokens."""
    parts = []
    for output in log.outputs:
        if output.new_token_ids:
            assert output.new_logprobs is not None
            assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids
            parts.append(output.new_logprobs)
    ids, logprobs, ranks, _ = zip(*parts, strict=True)
    return LogprobsLists(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks))


def check_prompt_logprobs(log: RequestLog, prompt: list[int], num_logprobs: int) -> None:
    told = [output.new_prompt_logprobs_tensors for output in log.outputs if output.new_token_ids]
    assert told[1:] == [None] * (len(told) - 1)
    assert told[0] is not None
    ids = told[0].logprob_token_ids.to_numpy()
    assert ids[:, 0].tolist() == prompt[1:]
    assert ids.shape == told[0].logprobs.shape == (len(prompt) - 1, num_logprobs + 1)
    assert told[0].selected_token_ranks.to_numpy().tolist() == [1] * (len(prompt) - 1)


@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("receives_each", [False, True])
def test_rows_survive_chunks_preemption_and_merging(
    launches_ahead: bool, receives_each: bool
) -> None:
    driver = make_driver(
        launches_ahead=launches_ahead, num_blocks=40, max_num_batched_tokens=7, max_num_seqs=8
    )
    prompts = [[3 * slot + place for place in range(2 + 3 * slot)] for slot in range(6)]
    logs = [
        add(
            driver,
            make_source(
                f"r{slot}",
                prompt,
                max_tokens=12,
                logprobs=slot if slot % 3 else None,
                prompt_logprobs=2 if slot % 2 else None,
            ),
        )
        for slot, prompt in enumerate(prompts)
    ]
    if receives_each:
        while driver.core.has_requests:
            if not (driver.can_schedule and driver.schedule()):
                driver.launch() if driver.can_launch else driver.collect()
            driver.receive()
    driver.run_until_idle()
    assert driver.core.statistics().num_preemptions
    for slot, log in enumerate(logs):
        assert len(log.token_ids) == 12
        if slot % 3:
            assert rows_heard(log).logprobs.shape == (12, slot + 1)
        else:
            assert all(output.new_logprobs is None for output in log.outputs)
        if slot % 2:
            check_prompt_logprobs(log, prompts[slot], 2)
        else:
            assert all(output.new_prompt_logprobs_tensors is None for output in log.outputs)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({"logprobs": 0}, []),
        ({"logprobs": 2}, [0, 1]),
        ({"logprobs": -1}, list(range(VOCAB_SIZE))),
        ({"logprob_token_ids": [9, 4]}, None),
        ({"logprob_token_ids": [9, 4], "logprobs": 2}, None),
    ],
)
def test_a_row_is_as_wide_as_was_asked(options: dict[str, Any], others: list[int] | None) -> None:
    driver = make_driver()
    log = add(driver, make_source(max_tokens=1, **options))
    driver.run_until_idle()
    (token_id,) = log.token_ids
    heard = rows_heard(log)
    if others is None:
        assert heard.logprob_token_ids.tolist() == [[token_id, 9, 4]]
    else:
        wanted = [(token_id + rank) % VOCAB_SIZE for rank in others]
        assert heard.logprob_token_ids.tolist() == [[token_id, *wanted]]
        assert heard.logprobs[0, 1:].tolist() == [-STEP * rank for rank in others]


def test_a_one_token_prompt_has_no_rows() -> None:
    driver = make_driver()
    log = add(driver, make_source(prompt=[5], max_tokens=2, prompt_logprobs=3))
    driver.run_until_idle()
    check_prompt_logprobs(log, [5], 3)


def test_a_failed_step_elsewhere_does_not_halve_a_prompt_s_rows() -> None:
    """What was computed before the reset is computed again: its rows went with the old row."""
    request, culprit = make_request("a", 10, prompt_logprobs=1), make_request("b", 2)
    scheduler = make_scheduler(request, culprit, budget=4)
    settle(schedule(scheduler))
    assert request.num_planned_tokens == 4
    scheduler.roll_back([schedule(scheduler, 1)])
    assert request.num_planned_tokens == 0
    scheduler.check_integrity()
    (new_row,) = schedule(scheduler, 2).plan.new_rows
    assert new_row.num_computed_tokens == 0


def test_a_failed_step_after_the_first_token_recomputes_nothing() -> None:
    request = make_request("a", 4, prompt_logprobs=1)
    scheduler = make_scheduler(request)
    settle(schedule(scheduler), 50)
    scheduler.roll_back([schedule(scheduler, 1)])
    assert request.num_planned_tokens == 4


@pytest.mark.parametrize("moment", ["launch", "collect"])
def test_prompt_rows_come_once_and_whole_though_a_step_fails(moment: FaultMoment) -> None:
    config = EngineConfig(executor="kv-checking", max_model_len=64, max_num_batched_tokens=4)
    executor = FlakyExecutor(config)
    driver = CoreDriver(make_core_for(config, executor), executor, pipeline_depth=1)
    prompt = list(range(10))
    log = add(driver, make_source("a", prompt, max_tokens=3, prompt_logprobs=0, logprobs=1))
    bad = add(driver, make_source("b", 3, max_tokens=3))
    while not bad.outputs:
        # The plan that has the end of one prompt and the start of the other.
        if driver.core.statistics().num_steps == 3:
            executor.next_faults[moment] = 1
        if not (driver.can_schedule and driver.schedule()):
            driver.launch() if driver.can_launch else driver.collect()
        driver.receive()
    driver.run_until_idle()
    assert executor.num_faults == 1
    assert (bad.token_ids, bad.finish_reason) == ([], FinishReason.ERROR)
    check_prompt_logprobs(log, prompt, 0)
    assert len(rows_heard(log).logprobs) == 3


@pytest.mark.parametrize(
    ("options", "result", "message"),
    [
        ({"logprobs": 1}, {}, r"plan 0 lacks logprobs \(1, 2\) of .*'r'"),
        ({"logprobs": 1}, {"logprobs": {1: row(5, 5)}}, "lacks logprobs"),
        ({"logprobs": 1}, {"logprobs": {0: row(5, 5, 6)}}, "lacks logprobs"),
        ({"prompt_logprobs": 1}, {}, r"plan 0 lacks prompt logprobs \(2, 2\)"),
        (
            {"prompt_logprobs": 1},
            {"prompt_logprobs": {0: prompt_tensors(3, 2)}},
            "lacks prompt logprobs",
        ),
    ],
)
def test_an_executor_that_leaves_out_what_was_asked_is_broken(
    options: dict[str, Any], result: dict[str, Any], message: str
) -> None:
    core = make_core()
    core.add(make_source(prompt=3, **options))
    plan = plan_step(core)
    with pytest.raises(StepError, match=message):
        core.update(StepResult(plan_id=plan.plan_id, token_ids=[5], **result))


def test_what_nobody_asked_for_is_not_told() -> None:
    core = make_core()
    core.add(make_source(prompt=3))
    plan = plan_step(core)
    core.update(
        StepResult(
            plan_id=plan.plan_id,
            token_ids=[5],
            logprobs={0: row(5, 5)},
            prompt_logprobs={0: prompt_tensors(2, 1)},
        )
    )
    (output,) = core.outboxes[0].take(0.0)[0].outputs
    assert output.new_logprobs is None
    assert output.new_prompt_logprobs_tensors is None


def test_nans_of_merged_tokens_add_up() -> None:
    core = make_core()
    core.add(make_source("a", 3))
    core.add(make_source("b", 3))
    for nans in ({0: 2}, None, {0: 3, 1: 1}):
        plan = plan_step(core)
        result = StepResult(plan_id=plan.plan_id, token_ids=[5, 5], num_nans_in_logits=nans)
        core.update(result)
    outputs = core.outboxes[0].take(0.0)[0].outputs
    assert [output.num_nans_in_logits for output in outputs] == [5, 1]
