"""What the engine command makes of its options, without running it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from trio_engine.cli import engine
from trio_engine.cli.executors import make_executor
from trio_engine.config import EngineConfig
from trio_engine.errors import ConfigError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.executor.null import NullExecutor

if TYPE_CHECKING:
    import argparse


def parse(*arguments: str) -> argparse.Namespace:
    return engine._parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (["--handshake-address=ipc:///a"], "ipc:///a"),
        (
            ["--data-parallel-address=node1", "--data-parallel-rpc-port=29550"],
            "tcp://node1:29550",
        ),
        (["--data-parallel-address=::1", "--data-parallel-rpc-port=1"], "tcp://[::1]:1"),
        # The whole address wins.
        (
            ["--handshake-address=ipc:///a", "--data-parallel-address=node1"],
            "ipc:///a",
        ),
    ],
)
def test_where_the_front_end_is(arguments: list[str], address: str) -> None:
    assert engine._handshake_address(parse(*arguments)) == address


@pytest.mark.parametrize(
    "arguments", [[], ["--data-parallel-address=node1"], ["--data-parallel-rpc-port=1"]]
)
def test_a_front_end_that_is_nowhere(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="--handshake-address is missing"):
        engine._handshake_address(parse(*arguments))


@pytest.mark.parametrize(
    ("arguments", "hello"),
    [
        ([], (0, True, False)),
        (["--headless", "--data-parallel-rank=3"], (3, False, True)),
    ],
)
def test_what_it_says_it_is(arguments: list[str], hello: tuple[int, bool, bool]) -> None:
    proc = engine._make_proc(parse("--handshake-address=ipc:///a", *arguments))
    status = proc._handshake._status
    index = int.from_bytes(proc._handshake.identity, "little")
    assert (index, status.local, status.headless) == hello


@pytest.mark.parametrize(
    "arguments",
    [
        ["--handshake-address=ipc:///a", "--max-num-seqs=0"],
        ["--handshake-address=ipc:///a", "--data-parallel-rank=-1"],
        ["--handshake-address=ipc:///a", "--quantization=int3"],
        ["--owner-fd=none"],
        ["--no-such-option"],
        [],
    ],
)
def test_a_bad_option_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        engine.run(arguments)
    assert caught.value.code == 2
    assert "usage: trio-engine engine" in capsys.readouterr().err


def test_executors_by_name() -> None:
    assert isinstance(make_executor(EngineConfig(executor="null")), NullExecutor)
    assert isinstance(make_executor(EngineConfig(executor="kv-checking")), KVCheckingExecutor)
    made = make_executor(EngineConfig(executor="torch"))
    assert type(made).__name__ == "TorchExecutor"


def test_the_commands_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trio_engine import __version__
    from trio_engine.__main__ import main

    for arguments, status, words in (
        ([], 0, "usage: trio-engine COMMAND"),
        (["--help"], 0, "run the engine process"),
        (["--version"], 0, __version__),
        (["no-such"], 2, "no command 'no-such'"),
    ):
        monkeypatch.setattr(sys, "argv", ["trio-engine", *arguments])
        assert main() == status
        output = capsys.readouterr()
        assert words in output.out + output.err
