"""Log probabilities of sampled tokens, against plain log-softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.model.decoding import CPU, new_row
from tests.model.sampling_oracle import log_softmax
from trio_engine.core.plan import StepPlan
from trio_engine.model.logprobs import lists_by_slot
from trio_engine.model.rows import Rows
from trio_engine.model.sampler import Sampler
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.outputs import LogprobsLists

pytestmark = pytest.mark.known_fault(kind="wrong-logprobs")

VOCAB = 60
TOLERANCE = 1e-4


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **fields)


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@torch.inference_mode()
def sample(
    logits: torch.Tensor, options: Sequence[SamplingParams]
) -> tuple[list[int], dict[int, LogprobsLists]]:
    """Tokens, and log probabilities by row."""
    rows = Rows(VOCAB, len(options), 64, 4, 1)
    sampler = Sampler(rows, VOCAB, CPU)
    new_rows = [new_row(slot, [slot], [], option) for slot, option in enumerate(options)]
    plan = StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[], new_rows=new_rows)
    rows.apply(plan)
    sampler.apply(plan)
    slots = np.arange(len(options))
    sampled = sampler.sample(logits.clone(), slots)
    return sampled.token_ids.tolist(), lists_by_slot(sampled.logprobs, slots)


def check_row(found: LogprobsLists, logits: torch.Tensor, token_id: int, num_others: int) -> None:
    """A row of the likeliest, against plain log-softmax."""
    truth = log_softmax(logits.tolist())
    ids, values, ranks = found.logprob_token_ids[0], found.logprobs[0], found.sampled_token_ranks
    assert found.logprob_token_ids.shape == found.logprobs.shape == (1, num_others + 1)
    assert ids[0] == token_id
    np.testing.assert_allclose(values, truth[ids], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(values[1:], np.sort(truth)[::-1][:num_others], atol=TOLERANCE)
    assert len(set(ids[1:].tolist())) == num_others
    assert ranks.tolist() == [int((truth >= truth[token_id]).sum())]
    assert (ids.dtype, values.dtype, ranks.dtype) == (np.int32, np.float32, np.int64)


@pytest.mark.parametrize("num_others", [0, 1, 5, VOCAB, -1])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"seed": 1, "temperature": 0.001},
        {"seed": 7, "temperature": 1.0},
        {"seed": 2, "temperature": 2.0},
        {"seed": 3, "top_k": 1},
        {"seed": 4, "logit_bias": {3: -100.0, 4: 50.0}},
        {"seed": 5, "allowed_token_ids": [8]},
        {"seed": 6, "repetition_penalty": 2.0, "presence_penalty": 2.0},
    ],
    ids=str,
)
def test_values_are_raw_whatever_the_options(fields: dict[str, Any], num_others: int) -> None:
    for seed in range(3):
        logits = random_logits(1, seed)
        (token_id,), found = sample(logits, [params(logprobs=num_others, **fields)])
        check_row(found[0], logits[0], token_id, VOCAB if num_others == -1 else num_others)
        if num_others == -1:
            assert np.exp(found[0].logprobs[0, 1:]).sum() == pytest.approx(1.0, abs=1e-5)


def test_each_row_of_a_mixed_batch_has_what_it_asked_for() -> None:
    logits = random_logits(9, seed=7)
    ids = {3: [5, 5, 59], 6: [0], 7: [1, 2, 3]}
    asked: list[int | None] = [None, 2, -1, None, 0, 2, None, None, 20]
    options = [
        params(seed=row, temperature=row % 2, logprobs=num, logprob_token_ids=ids.get(row))
        for row, num in enumerate(asked)
    ]
    tokens, found = sample(logits, options)
    assert found.keys() == set(range(9)) - {0}
    for row, num in enumerate(asked):
        if num is not None:
            check_row(found[row], logits[row], tokens[row], VOCAB if num == -1 else num)
        elif row:
            truth = log_softmax(logits[row].tolist())
            wanted = [tokens[row], *ids[row]]
            assert found[row].logprob_token_ids.tolist() == [wanted]
            np.testing.assert_allclose(found[row].logprobs[0], truth[wanted], atol=TOLERANCE)
    for row in range(1, 9):
        _, alone = sample(logits[row : row + 1], [options[row]])
        assert alone[0].logprob_token_ids.tolist() == found[row].logprob_token_ids.tolist()
        np.testing.assert_allclose(alone[0].logprobs, found[row].logprobs, atol=1e-6)


def test_options_beside_log_probabilities_draw_the_same_tokens() -> None:
    logits = random_logits(6, seed=8)
    options = [params(seed=row, temperature=row % 3 / 2) for row in range(6)]
    plain, none = sample(logits, options)
    asking = [params(seed=row, temperature=row % 3 / 2, logprobs=row) for row in range(6)]
    assert none == {}
    assert sample(logits, asking)[0] == plain


def test_equal_logits_share_the_worst_rank() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [4, 9, 11]] = 2.0
    logits[0, 6] = 3.0
    for allowed, rank in (([6], 1), ([9], 4), ([0], VOCAB)):
        _, found = sample(logits, [params(logprobs=0, allowed_token_ids=allowed)])
        assert found[0].sampled_token_ranks.tolist() == [rank]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_tokens_without_a_logit_have_minus_infinity(value: float) -> None:
    logits = random_logits(2)
    logits[0, 10:] = value
    logits[1] = value
    _, found = sample(logits, [params(temperature=0.0, logprobs=-1)] * 2)
    by_id = dict(zip(found[0].logprob_token_ids[0], found[0].logprobs[0], strict=True))
    assert all((by_id[i] == -np.inf) == (i >= 10) for i in range(VOCAB))
    assert not np.isnan(found[1].logprobs).any()


def test_a_row_keeps_no_batch_alive() -> None:
    _, found = sample(random_logits(4), [params(logprobs=2)] * 4)
    assert all(array.base is None for rows in found.values() for array in rows[:3])
