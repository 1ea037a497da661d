"""The random numbers of sampling, as a pure function of a seed and an output position.

Layer: model. No generator and no state, so neighbours, chunks, row moves and replays cannot matter.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_SEED_MASK = 2**64 - 1

NUM_ROUNDS = 3
"""A draw picks a group of groups of tokens, then a group, then a token, each by its own number."""


def draw_numbers(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The numbers of a draw's rounds, ``[n, NUM_ROUNDS]``; arguments as for ``uniforms``."""
    rounds = positions[:, None] * NUM_ROUNDS + np.arange(NUM_ROUNDS)
    return uniforms(seeds[:, None], rounds)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each pair of seed and position.

    SplitMix64 (Steele, Lea and Flood, 2014) twice: the seed's hash starts a sequence, whose
    element at the position is the number. Equal on every machine.

    Args:
        seeds: ``[n]``, or what goes with the positions.
        positions: ``[n]``, of one number after the other under a seed.
    """
    hashed = _mix(_mix(seeds) + positions.astype(np.uint64) * _STEP)
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seed_of_row(seed: int | None) -> int:
    """A request's seed as 64 unsigned bits; one from the system's entropy where it has none."""
    return random.SystemRandom().getrandbits(64) if seed is None else seed & _SEED_MASK


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * _FIRST_FACTOR
    values = (values ^ (values >> np.uint64(27))) * _SECOND_FACTOR
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
