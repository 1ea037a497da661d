"""The fuzz targets: seeds reach their decoders, and a decoder that is broken is found."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

import fuzz
from fuzz.__main__ import parse, run
from fuzz.chat_template import bounded
from fuzz.mutate import MAX_INPUT_BYTES, mutate
from fuzz.runner import TIME_LIMIT_S, Runner
from fuzz.target import SEEDS, Input, Target, join, split
from fuzz.targets import NAMES, load_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Check = Callable[[bytes], bool]


@pytest.fixture(params=NAMES)
def target(request: pytest.FixtureRequest) -> Target:
    return load_target(request.param)


# The targets


def test_every_seed_keeps_the_invariant_and_some_are_accepted(target: Target) -> None:
    seeds = target.seeds()
    accepted = [seed.source for seed in seeds if target.check(seed.data)]
    assert accepted
    assert len({seed.data for seed in seeds}) == len(seeds)


def test_what_hypothesis_makes_keeps_the_invariant(target: Target) -> None:
    before = target.num_inputs
    target.test()
    assert target.num_inputs > before


def test_a_target_states_its_invariant_in_the_first_line(target: Target) -> None:
    assert target.invariant.startswith("Any ")
    assert target.invariant.endswith(".")


def test_every_module_with_a_target_and_every_folder_of_seeds_is_listed() -> None:
    folder = SEEDS.parent
    assert str(folder) in fuzz.__path__
    modules = {path.stem for path in folder.glob("*.py") if "TARGET = " in path.read_text()}
    assert modules == set(NAMES)
    assert {path.name for path in SEEDS.iterdir()} <= modules


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8))
def test_parts_come_back_as_they_were(parts: list[bytes]) -> None:
    assert split(join(parts)) == parts


@given(st.binary(max_size=50))
def test_any_bytes_have_parts(data: bytes) -> None:
    assert len(split(data)) <= 8


def test_hostile_templates_are_kept_small() -> None:
    loops = "{% for i in range(100000) %}" * 9
    assert bounded(loops).count("for") == 2
    assert "range(10)" in bounded(loops)
    assert bounded("9**9**9") == "9**99"


# The runner, with decoders that are wrong on purpose


def decode_counted(data: bytes) -> bytes:
    """Trusts its first byte, as no decoder should."""
    return bytes(data[1 + index] for index in range(data[0]))


def check_counted(data: bytes) -> bool:
    if not data:
        return False
    decode_counted(data)
    return True


def planted(check: Check = check_counted) -> Target:
    return Target("planted", "Any bytes decode.", check, st.binary(), lambda: [b"\x03abc"])


def failures_of(
    target: Target, folder: Path, seconds: float = 20.0, time_limit_s: float = TIME_LIMIT_S
) -> int:
    runner = Runner(crashes=folder, time_limit_s=time_limit_s)
    runner.fuzz(target, seconds)
    return runner.num_failed


def test_a_broken_decoder_is_found_and_its_input_is_shown_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failures_of(planted(), tmp_path) == 1
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    with pytest.raises(IndexError):
        check_counted(data)
    output = capsys.readouterr()
    assert f"planted FAILED: IndexError against: Any bytes decode.\ninput of {len(data)}" in (
        output.out
    )
    assert f"{path}:\n{data.hex()}\n" in output.out
    assert "in decode_counted" in output.err


def test_a_failure_in_what_hypothesis_made_is_kept_as_the_decoder_got_it(tmp_path: Path) -> None:
    def check(data: bytes) -> bool:
        assert not data.startswith(b"made")
        return False

    made = st.just(b"made by Hypothesis")
    assert failures_of(Target("planted", "Any.", check, made), tmp_path) == 1
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"made by Hypothesis"]


def test_an_endless_decoder_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(data: bytes) -> bool:
        while data:
            try:
                time.monotonic()
            except Exception:
                return True
        return False

    assert failures_of(planted(check), tmp_path, time_limit_s=0.2) == 1
    assert "planted FAILED: TooSlowError" in capsys.readouterr().out


def test_an_input_that_may_run_long_is_stopped_and_no_failure(tmp_path: Path) -> None:
    def check(data: bytes) -> bool:
        while data:
            pass
        return False

    target = Target("planted", "Any.", check, st.binary(), lambda: [b"x"], may_run_long=True)
    assert failures_of(target, tmp_path, seconds=0.1, time_limit_s=0.2) == 0
    assert target.num_inputs >= 1


def test_a_sound_decoder_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One that it accepts and one that it does not, or a stall could leave the first alone.
    target = Target(
        "planted", "Any.", lambda data: len(data) > 3, st.binary(), lambda: [b"abcd", b"a"]
    )
    assert failures_of(target, tmp_path, seconds=0.2) == 0
    assert not list(tmp_path.iterdir())
    assert f"{target.num_inputs:,} executions" in capsys.readouterr().out
    assert 0 < target.num_accepted < target.num_inputs


def test_the_same_seed_makes_the_same_inputs() -> None:
    seeds = [b"abcdefgh" * 8, b"0123456789"]
    first, second = (
        [mutate(seeds[0], seeds, rng) for _ in range(500)]
        for rng in (random.Random(1), random.Random(1))
    )
    assert first == second
    assert len(set(first)) > 400
    assert max(map(len, first)) > 1000
    rng = random.Random(2)
    assert len(mutate(bytes(2 * MAX_INPUT_BYTES), seeds, rng)) <= MAX_INPUT_BYTES


def test_inputs_from_files_are_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(crashes=tmp_path)
    inputs = [Input("good", b"\x01a"), Input("empty", b""), Input("bad", b"\x02a")]
    runner.replay(planted(), inputs)
    assert runner.num_failed == 1
    output = capsys.readouterr().out
    assert "good: accepted" in output
    assert "empty: refused" in output
    assert "planted FAILED: IndexError" in output


def test_the_command_runs_targets_for_a_time_and_files_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(parse(["--target", "request_frames", "--seconds", "0.1"])) == 0
    path = next((SEEDS / "chat_template").iterdir())
    assert run(parse(["--target", "chat_template", str(path)])) == 0
    output = capsys.readouterr().out
    assert output.startswith("request_frames ")
    assert f"{path}: accepted" in output


def test_files_need_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["some-file"])
    assert "need a --target" in capsys.readouterr().err
