"""The random numbers of sampling: a function of seed and position, evenly spread."""

from __future__ import annotations

import numpy as np

from trio_engine.model.draw import seed_of_row, uniforms

PINNED = [0.6524484863740322, 0.7012121095215252, 0.7347204584623639, 0.3662420901697574]


def at(seeds: list[int], positions: list[int]) -> list[float]:
    values = uniforms(np.array(seeds, np.uint64), np.array(positions, np.int64))
    return [float(value) for value in values]


def test_numbers_never_change() -> None:
    """Pinned: a seed must give the same text in every release."""
    assert at([0, 0, 42, 2**64 - 1], [0, 1, 7, 0]) == PINNED


def test_a_number_depends_on_its_own_seed_and_position_only() -> None:
    together = at([3, 9, 3], [5, 5, 6])
    assert together == at([3], [5]) + at([9], [5]) + at([3], [6])
    assert len(set(together)) == 3


def test_numbers_are_even_over_seeds_and_over_positions() -> None:
    count = 100_000
    for seeds, positions in (
        (np.arange(count), np.zeros(count)),
        (np.arange(count), np.full(count, 17)),
        (np.zeros(count), np.arange(count)),
    ):
        values = uniforms(seeds.astype(np.uint64), positions.astype(np.int64))
        assert values.min() >= 0
        assert values.max() < 1
        observed = np.histogram(values, bins=100, range=(0, 1))[0]
        chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum()
        assert chi_square < 149  # 99 degrees of freedom: exceeded once in 1,000
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.012


def test_negative_and_missing_seeds_become_64_bits() -> None:
    assert seed_of_row(-5) == 2**64 - 5
    assert seed_of_row(2**63 - 1) == 2**63 - 1
    assert 0 <= seed_of_row(None) < 2**64
    assert seed_of_row(None) != seed_of_row(None)
