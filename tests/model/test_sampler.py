"""Sampling: cuts against a plain reference, distributions, and independence of neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trio_engine.model.sampler import Sampler
from trio_engine.model.sampling_rows import SamplingRows
from trio_engine.sampling_params import SamplingParams

VOCAB = 40


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **fields)


def sample(
    logits: torch.Tensor, options: list[SamplingParams], positions: list[int] | None = None
) -> tuple[list[int], list[int] | None]:
    """Samples each row by its own options; the logits stay as they are."""
    rows = SamplingRows(len(options), logits.shape[1])
    for slot, option in enumerate(options):
        rows.set_up(slot, option)
    slots = np.arange(len(options))
    sampled = Sampler(rows).sample(logits.clone(), slots, np.array(positions or 0 * slots))
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


def observed_counts(logits: torch.Tensor, fields: dict[str, Any], num_seeds: int) -> list[int]:
    counts = [0] * logits.shape[0]
    step = 4000
    for start in range(0, num_seeds, step):
        options = [params(seed=seed, **fields) for seed in range(start, start + step)]
        for token_id in sample(logits.expand(step, -1), options)[0]:
            counts[token_id] += 1
    return counts


@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_only_tokens_within_the_cuts_are_drawn(fields: dict[str, Any]) -> None:
    for seed in range(3):
        logits = random_logits(1, seed)[0]
        allowed = reference_probabilities(logits.tolist(), params(**fields))
        counts = observed_counts(logits, fields, 4000)
        assert not [i for i, count in enumerate(counts) if count and not allowed[i]]
        likely = [i for i, probability in enumerate(allowed) if probability > 0.005]
        assert all(counts[i] for i in likely)


@pytest.mark.slow
@pytest.mark.parametrize("position", [0, 31])
@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_seeds_give_the_exact_distribution(fields: dict[str, Any], position: int) -> None:
    """Chi-square over 20,000 seeds, against the 0.999 quantile (Wilson and Hilferty)."""
    logits = random_logits(1, seed=9, vocab=12)[0]
    expected = reference_probabilities(logits.tolist(), params(**fields))
    counts = [0] * 12
    options = [params(seed=seed, **fields) for seed in range(20_000)]
    for token_id in sample(logits.expand(20_000, -1), options, [position] * 20_000)[0]:
        counts[token_id] += 1
    common = [i for i, probability in enumerate(expected) if probability * 20_000 >= 5]
    rest = 20_000 - sum(counts[i] for i in common)
    rest_expected = 20_000 * (1 - sum(expected[i] for i in common))
    chi_square = sum((counts[i] - e) ** 2 / e for i in common if (e := expected[i] * 20_000))
    if rest_expected > 5:
        chi_square += (rest - rest_expected) ** 2 / rest_expected
    freedom = max(1, len(common) - 1 + (rest_expected > 5))
    assert rest <= 30 or rest_expected > 5
    assert chi_square <= freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


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


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 5], logits[:, 6], logits[:, 7] = 9.0, 8.0, 7.0
    option = params(temperature=0.0, min_tokens=3, stop_token_ids=[5])
    option.eos_token_id = 6
    assert sample(logits, [option] * 4, [0, 2, 3, 4])[0] == [7, 7, 5, 5]


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
