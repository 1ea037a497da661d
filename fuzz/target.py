"""What every fuzz target is: a check of bytes, where its inputs come from, and how they look.

A target serves four callers by one ``check``: the runner's mutated seeds, Hypothesis in a plain
pytest run, Hypothesis driven from outside (``fuzz_one_input``), and Atheris.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hypothesis import HealthCheck, given, settings, strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SEEDS = Path(__file__).parent / "seeds"

_MAX_PARTS = 8
_LENGTH_BYTES = 2
_MAX_PART_BYTES = (1 << 8 * _LENGTH_BYTES) - 1


class Input(NamedTuple):
    """Bytes for a target, and where they came from."""

    source: str
    data: bytes


class Target:
    """A decoder under fuzzing.

    Args:
        name: the module's, also of its folder of seeds.
        invariant: what holds for any input, in one sentence.
        check: takes any bytes; returns whether the decoder accepted them, and raises if the
            invariant does not hold.
        inputs: inputs of a likely form, as bytes.
        make_seeds: more inputs to start from, beside those in the folder.
        may_run_long: an input that takes longer than the runner's limit is stopped, and no failure.

    Attributes:
        name: as given.
        invariant: as given.
        last_input: what ``check`` had last; Hypothesis does not tell what it made.
        num_inputs: how many it had.
        num_accepted: how many of them the decoder accepted.
        may_run_long: as given.
        on_input: called with each of them before it runs.
    """

    def __init__(
        self,
        name: str,
        invariant: str | None,
        check: Callable[[bytes], bool],
        inputs: st.SearchStrategy[bytes],
        make_seeds: Callable[[], Iterable[bytes]] = tuple,
        *,
        may_run_long: bool = False,
    ) -> None:
        self.name = name
        self.invariant = (invariant or "").partition("\n")[0]
        self.last_input = b""
        self.num_inputs = self.num_accepted = 0
        self.may_run_long = may_run_long
        self.on_input: Callable[[bytes], object] | None = None
        self._check = check
        self._inputs = inputs
        self._make_seeds = make_seeds

    def check(self, data: bytes) -> bool:
        """Runs one input; returns whether the decoder accepted it."""
        self.last_input = data
        self.num_inputs += 1
        if self.on_input is not None:
            self.on_input(data)
        accepted = self._check(data)
        self.num_accepted += accepted
        return accepted

    def seeds(self) -> list[Input]:
        """The committed seeds, then those made from what the repository has anyway."""
        committed = sorted((SEEDS / self.name).glob("*"))
        made = self._make_seeds()
        return [
            *(Input(path.name, path.read_bytes()) for path in committed),
            *(Input(f"made {index}", data) for index, data in enumerate(made)),
        ]

    @cached_property
    def test(self) -> Callable[[], None]:
        """The property as a Hypothesis test; a run of pytest calls it."""

        @settings(suppress_health_check=[HealthCheck.too_slow])
        @given(self._inputs)
        def any_input_keeps_the_invariant(data: bytes) -> None:
            self.check(data)

        return any_input_keeps_the_invariant

    @cached_property
    def fuzz_one_input(self) -> Callable[[bytes], object]:
        """The same test, for a fuzzer that chooses the bytes which Hypothesis draws from."""
        return cast("Any", self.test).hypothesis.fuzz_one_input  # type: ignore[no-any-return]


def join(parts: Sequence[bytes | memoryview]) -> bytes:
    """Several frames or files as one input: their number, each length but the last, and they."""
    assert 1 <= len(parts) <= _MAX_PARTS, "not a seed that the targets can read"
    *first, last = map(bytes, parts)
    lengths = [min(len(part), _MAX_PART_BYTES).to_bytes(_LENGTH_BYTES, "big") for part in first]
    prefixed = [length + part for length, part in zip(lengths, first, strict=True)]
    return b"".join([bytes([len(parts)]), *prefixed, last])


def split(data: bytes) -> list[bytes]:
    """The parts in any input; those that are cut off are short or absent."""
    num_parts, rest = data[0] % (_MAX_PARTS + 1) if data else 0, data[1:]
    parts: list[bytes] = []
    while len(parts) < num_parts - 1:
        end = _LENGTH_BYTES + int.from_bytes(rest[:_LENGTH_BYTES], "big")
        parts.append(rest[_LENGTH_BYTES:end])
        rest = rest[end:]
    return [*parts, rest] if num_parts else parts
