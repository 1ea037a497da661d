"""Inputs near a seed: a few random changes of the kinds that decoders are known to trip over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

MAX_INPUT_BYTES = 1 << 16

_NUMBERS_OF_CHANGES = [1, 1, 1, 2, 5]  # few, or hardly any input would get past the first check
_MAX_REPEATS = 6000  # beyond the interpreter's recursion limit, and its limit of 4300 digits

# Lengths and numbers at the edges, in the spellings of all formats.
_INTERESTING = [
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\xff" * 8,
    b"\x00\x00\x00\x00\x00\x00\x00\x80",
    b"\xdd\xff\xff\xff\xff",
    b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"0",
    b"-1",
    b"1e308",
    b"1e999",
    b"18446744073709551616",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"\\ud800",
    b"\xed\xa0\x80",
    b"NaN",
]


def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """A changed copy of ``data``, at most ``MAX_INPUT_BYTES`` long.

    Args:
        data: what to start from.
        others: inputs of the same target, to take pieces from.
        rng: decides everything.
    """
    changed = bytearray(data)
    for _ in range(rng.choice(_NUMBERS_OF_CHANGES)):
        rng.choice(_CHANGES)(changed, others, rng)
    return bytes(changed[:MAX_INPUT_BYTES])


def _slice(data: Sequence[int], rng: random.Random) -> slice:
    """Any place; mostly few bytes, for formats have short fields."""
    start = rng.randint(0, len(data))
    return slice(start, start + min(rng.randint(0, 1 << rng.randint(0, 10)), len(data) - start))


def _set_byte(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _flip_bit(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _add_to_byte(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    if data:
        place = rng.randrange(len(data))
        data[place] = (data[place] + rng.choice([-1, 1])) % 256


def _delete(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    del data[_slice(data, rng)]


def _cut(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    del data[rng.randint(0, len(data)) :]


def _insert(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    place = rng.randint(0, len(data))
    data[place:place] = rng.randbytes(1 << rng.randint(0, 5))


def _put_interesting(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    piece, place = rng.choice(_INTERESTING), rng.randint(0, len(data))
    data[place : place + rng.choice([0, 1, len(piece)])] = piece


def _repeat(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    """Makes deep nesting of an opening bracket, and huge numbers of a digit."""
    place = rng.randint(0, len(data))
    piece = data[place : place + rng.choice([1, 1, 1, 2, 4, 16])]
    repeats = min(rng.choice([2, 10, 300, _MAX_REPEATS]), MAX_INPUT_BYTES // max(1, len(piece)))
    data[place:place] = piece * repeats


def _copy_within(data: bytearray, _: Sequence[bytes], rng: random.Random) -> None:
    place = rng.randint(0, len(data))
    data[place : place + rng.choice([0, 4])] = data[_slice(data, rng)]


def _copy_from_other(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    other = rng.choice(others)
    data[_slice(data, rng)] = other[_slice(other, rng)]


_CHANGES: list[Callable[[bytearray, Sequence[bytes], random.Random], None]] = [
    _set_byte,
    _flip_bit,
    _add_to_byte,
    _delete,
    _cut,
    _insert,
    _put_interesting,
    _put_interesting,
    _repeat,
    _copy_within,
    _copy_from_other,
]
