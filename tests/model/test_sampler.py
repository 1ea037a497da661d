"""Sampling: cuts against a plain reference, distributions, and independence of neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.decoding import CPU, new_row
from trio_engine.core.plan import StepPlan
from trio_engine.model.rows import Rows
from trio_engine.model.sampler import Sampler
from trio_engine.sampling_params import SamplingParams

VOCAB = 40


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **fields)


def sample(
    logits: torch.Tensor, options: list[SamplingParams], positions: list[int] | None = None
) -> tuple[list[int], list[int] | None]:
    """Samples each row by its own options; the logits stay as they are."""
    rows = Rows(logits.shape[1], len(options), 64, 4, 1)
    sampler = Sampler(rows, logits.shape[1], CPU)
    new_rows = [
        new_row(slot, [0] * (position + 1), [], option, num_prompt_tokens=1)
        for slot, (option, position) in enumerate(
            zip(options, positions or [0] * len(options), strict=True)
        )
    ]
    plan = StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[], new_rows=new_rows)
    rows.apply(plan)
    sampler.apply(plan)
    sampled = sampler.sample(logits.clone(), np.arange(len(options)))
    num_nans = None if sampled.num_nans is None else sampled.num_nans.tolist()
    return sampled.token_ids.tolist(), num_nans


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 2


def reference_probabilities(logits: list[float], option: SamplingParams) -> list[float]:
    """Temperature, min_p, top_k, top_p in order, one row, in plain float64."""
    largest = max(logits)
    weights = [math.exp((x - largest) / option.temperature) for x in logits]
    weights = [w if w >= option.min_p else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    for index in order[option.top_k or len(order) :]:
        weights[index] = 0.0
    total, mass = sum(weights), 0.0
    for index in order:
        if mass >= option.top_p * total:
            weights[index] = 0.0
        mass += weights[index]
    total = sum(weights)
    return [w / total for w in weights]


CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "min_p": 0.2},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 0.001},
    {"top_p": 0.999},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 9, "top_p": 0.7},
]

# In each of these a nucleus that is 0.05 larger or smaller has other tokens.
COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 40},
    {"temperature": 1.6, "top_k": 90},
    {"top_p": 0.9},
    {"temperature": 1.4, "top_p": 0.6},
    {"min_p": 0.05},
    {"temperature": 1.2, "min_p": 0.02, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 60, "min_p": 0.01},
    {"temperature": 1.3, "top_k": 80, "top_p": 0.95, "min_p": 0.005},
]
NUM_SEEDS = 20_000


def seed_counts(
    logits: torch.Tensor, fields: dict[str, Any], *, num_seeds: int = NUM_SEEDS, position: int = 0
) -> list[int]:
    """How often each token of one row is drawn by the seeds from 0 on, all in one batch."""
    drawn = seed_draws(logits, fields, num_seeds, position)
    counts: list[int] = drawn.bincount(minlength=logits.numel()).tolist()
    return counts


@torch.inference_mode()
def seed_draws(
    logits: torch.Tensor, fields: dict[str, Any], num_seeds: int, position: int
) -> torch.Tensor:
    """The token of one row that each of the seeds from 0 on draws, all in one batch."""
    rows = Rows(logits.numel(), num_seeds, 1, 4, 1)
    rows.num_tokens[:] = position
    sampler = Sampler(rows, logits.numel(), CPU)
    options = sampler.options
    options.set_up(0, params(**fields))
    for column in (options.temperature, options.min_p, options.top_k, options.top_p):
        column[:] = column[0]
    options.seed[:] = np.arange(num_seeds)
    return sampler.sample(logits.repeat(num_seeds, 1), np.arange(num_seeds)).token_ids


def chi_square_p_value(counts: list[int], probabilities: list[float]) -> float:
    """Of counts under probabilities; tokens that are expected less than five times are one."""
    total = sum(counts)
    common = [i for i, probability in enumerate(probabilities) if probability * total >= 5]
    observed = [counts[i] for i in common] + [total - sum(counts[i] for i in common)]
    expected = [probabilities[i] * total for i in common]
    expected.append(total - sum(expected))
    if expected[-1] < 1e-6:
        if observed[-1]:
            return 0.0
        del observed[-1], expected[-1]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_only_tokens_within_the_cuts_are_drawn(fields: dict[str, Any]) -> None:
    for seed in range(3):
        logits = random_logits(1, seed)[0]
        allowed = reference_probabilities(logits.tolist(), params(**fields))
        counts = seed_counts(logits, fields, num_seeds=4000)
        assert not [i for i, count in enumerate(counts) if count and not allowed[i]]
        likely = [i for i, probability in enumerate(allowed) if probability > 0.005]
        assert all(counts[i] for i in likely)


@pytest.mark.parametrize("position", [0, 31])
@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_seeds_give_the_exact_distribution(fields: dict[str, Any], position: int) -> None:
    logits = random_logits(1, seed=9, vocab=128)[0] / 2
    expected = reference_probabilities(logits.tolist(), params(**fields))
    assert chi_square_p_value(seed_counts(logits, fields, position=position), expected) > 1e-4


def test_the_last_bits_of_logits_change_hardly_a_draw() -> None:
    """They depend on the neighbours of a row, and most tokens of a vocabulary are unlikely."""
    logits = random_logits(1, seed=1, vocab=49_152)[0]
    nearly = logits + 3e-5 * random_logits(1, seed=2, vocab=49_152)[0]
    num_changed = 0
    for position in range(4):
        drawn, drawn_nearly = (seed_draws(row, {}, 250, position) for row in (logits, nearly))
        num_changed += int((drawn != drawn_nearly).sum())
    assert num_changed <= 1


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 27, 28, 1000, 1001])
def test_every_token_of_any_vocabulary_can_be_drawn(vocab: int) -> None:
    counts = seed_counts(torch.zeros(vocab), {}, num_seeds=20 * vocab)
    assert len(counts) == vocab
    assert min(counts) > 0


@pytest.mark.parametrize("shift", [-0.05, 0.05])
@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_the_distribution_test_finds_a_nucleus_that_is_off(
    fields: dict[str, Any], shift: float
) -> None:
    top_p = fields.get("top_p", 1.0) + shift
    if top_p > 1:
        return
    logits = random_logits(1, seed=9, vocab=128)[0] / 2
    expected = reference_probabilities(logits.tolist(), params(**fields))
    assert chi_square_p_value(seed_counts(logits, {**fields, "top_p": top_p}), expected) < 1e-6


def test_the_distribution_test_takes_the_expected_counts() -> None:
    """Its p-values are those of tables: 0.05 at 3.841 for one degree of freedom."""
    total, off = 10_000, (3.841 * 2500) ** 0.5
    counts = [round(total / 2 + off), round(total / 2 - off)]
    assert chi_square_p_value(counts, [0.5, 0.5]) == pytest.approx(0.05, rel=0.02)
    assert chi_square_p_value([2500] * 4, [0.25] * 4) == 1.0
    assert chi_square_p_value([1, 9999], [0.0, 1.0]) == 0.0


@pytest.mark.known_fault(kind="shared-draws")
def test_neighbours_do_not_matter() -> None:
    """Each row alone gives what it gives among others of every kind, in any order."""
    logits = random_logits(8, seed=4, vocab=300)
    options = [
        params(temperature=0.0),
        params(seed=1),
        params(seed=2, top_k=5),
        params(),
        params(seed=1, top_p=0.5),
        params(temperature=0.0, min_tokens=5, stop_token_ids=[int(logits[5].argmax())]),
        params(seed=-7, min_p=0.3, temperature=1.7),
        params(seed=1),
    ]
    positions = [0, 3, 11, 0, 3, 2, 9, 4]
    together, _ = sample(logits, options, positions)
    for order in (range(8), [3, 7, 0, 6, 1, 5, 2, 4]):
        rows = list(order)
        again, _ = sample(logits[rows], [options[i] for i in rows], [positions[i] for i in rows])
        for index, row in enumerate(rows):
            alone, _ = sample(logits[row : row + 1], [options[row]], [positions[row]])
            if row != 3:  # has no seed
                assert alone == [together[row]] == [again[index]]


def test_a_slot_that_is_set_up_again_forgets_its_last_row() -> None:
    """Also where no plan has said that the last row is finished."""
    logits = random_logits(1, seed=6)
    rows = Rows(VOCAB, 1, 64, 4, 1)
    sampler = Sampler(rows, VOCAB, CPU)
    options = [
        params(logprob_token_ids=[3, 4], allowed_token_ids=[5], seed=1),
        params(presence_penalty=2.0, logit_bias={5: 9.0}, min_tokens=3, stop_token_ids=[6]),
        params(logprobs=2, repetition_penalty=3.0, bad_words_token_ids=[[7]], seed=1),
        params(seed=1),
    ]
    for option in options * 2:
        plan = StepPlan(
            plan_id=0,
            slots=[],
            num_scheduled_tokens=[],
            new_rows=[new_row(0, [1, 2, 3], [], option, num_prompt_tokens=1)],
        )
        rows.apply(plan)
        sampler.apply(plan)
        again = sampler.sample(logits.clone(), np.arange(1))
        if option.seed is not None:
            assert again.token_ids.tolist() == sample(logits, [option], [2])[0]
        widths = [group.values.token_ids.shape[1] for group in again.logprobs]
        assert widths == ([] if option.num_logprobs is None else [3])


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0])
def test_a_wide_vocabulary_is_cut_alike_by_head_and_by_sort(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nuclei within the head and beyond it, and limits beyond it."""
    logits = random_logits(6, seed=2, vocab=3000) * scale
    fields: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 1500},
        {"top_k": 20},
        {},
    ]
    for some in (range(3), range(6), [0, 4, 5]):
        rows = list(some)
        options = [params(seed=row, **fields[row]) for row in rows]
        with monkeypatch.context() as patch:
            patch.setattr("trio_engine.model.sampler._HEAD_SIZE", 0)
            sorted_all = sample(logits[rows], options)
        assert sample(logits[rows], options) == sorted_all


def test_unseeded_rows_differ_from_each_other() -> None:
    assert len(set(sample(torch.zeros(50, 1000), [params()] * 50)[0])) > 30


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(5)
    token_ids, num_nans = sample(logits, [params(temperature=0.0)] * 5)
    assert token_ids == logits.argmax(-1).tolist()
    assert num_nans is None


@pytest.mark.known_fault(kind="lost-stop-rule")
def test_stop_tokens_are_masked_until_min_tokens() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 5], logits[:, 6], logits[:, 7] = 9.0, 8.0, 7.0
    option = params(temperature=0.0, min_tokens=3, stop_token_ids=[5])
    option.eos_token_id = 6
    assert sample(logits, [option] * 4, [0, 2, 3, 4])[0] == [7, 7, 5, 5]


@pytest.mark.known_fault(kind="token-out-of-range")
def test_stop_tokens_outside_the_vocabulary_reach_no_other_row() -> None:
    logits = random_logits(3)
    option = params(temperature=0.0, min_tokens=1, stop_token_ids=[VOCAB, VOCAB + 3, -1])
    assert sample(logits, [option] * 3)[0] == logits.argmax(-1).tolist()


def test_equal_logits_are_cut_together() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert set(_drawn(logits, top_k=2)) == {1, 2, 3}
    assert set(_drawn(logits, top_p=0.4)) == {1, 2, 3}


def _drawn(logits: torch.Tensor, **fields: Any) -> list[int]:
    options = [params(seed=seed, **fields) for seed in range(200)]
    return sample(logits.expand(200, -1), options)[0]


def test_nans_count_and_are_never_drawn() -> None:
    logits = random_logits(4)
    logits[1, 3:6] = torch.nan
    logits[2, int(logits[2].argmax())] = torch.nan
    options = [params(temperature=0.0), params(seed=1), params(temperature=0.0), params(seed=1)]
    token_ids, num_nans = sample(logits, options)
    clean = logits.nan_to_num(nan=-torch.inf)
    assert num_nans == [0, 3, 1, 0]
    assert token_ids[2] == int(clean[2].argmax())
    assert token_ids == sample(clean, options)[0]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"seed": 3}, {"seed": 3, "top_p": 0.5}])
def test_rows_without_a_finite_logit_stay_defined(value: float, fields: dict[str, Any]) -> None:
    logits = random_logits(2)
    logits[0] = value
    token_ids, _ = sample(logits, [params(**fields)] * 2)
    assert 0 <= token_ids[0] < VOCAB
    assert token_ids[1] == sample(logits[1:], [params(**fields)])[0][0]


def test_the_lowest_temperature_does_not_overflow() -> None:
    logits = random_logits(1) * 1e30
    assert sample(logits, [params(seed=1, temperature=0.01)])[0] == logits.argmax(-1).tolist()
