"""``trio-engine generate``: what a user sees of it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from trio_engine import __main__ as command_line
from trio_engine.cli import generate

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.mark.slow
def test_one_prompt_streams_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.run([QUESTION]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n"


@pytest.mark.slow
def test_several_prompts_are_answered_in_order_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.run([QUESTION, "Once upon a", "--json", "--max-tokens", "12"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], first["text"], first["finish_reason"]) == (QUESTION, ANSWER, "stop")
    assert second["prompt"] == "Once upon a"
    assert first["completion_tokens"] == len(first["token_ids"]) == 8
    assert first["prompt_tokens"] > 8
    assert first["ttft_s"] > 0
    assert first["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_prompt_that_cannot_be_served_hides_no_other_answer(
    form: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["", "one two three", "word " * 100, "four five six"]
    options = ["--no-chat", "--max-tokens=3", "--max-model-len=32", *form]
    assert generate.run([*prompts, *options]) == 1
    shown = capsys.readouterr()
    errors = shown.err.splitlines()
    assert [line.partition(" must ")[0] for line in errors] == ["trio-engine: prompt"] * 2
    if form:
        results = [json.loads(line) for line in shown.out.splitlines()]
        assert [result["prompt"] for result in results] == prompts
        assert ["error" in result for result in results] == [True, False, True, False]
        assert "must not be empty" in results[0]["error"]
        assert "must be shorter than max_model_len" in results[2]["error"]
    else:
        blocks = shown.out.removesuffix("\n\n").split("\n\n> ")
        assert len(blocks) == 4
        assert all(block.rpartition("\n")[2] for block in blocks[1::2])  # has an answer


@pytest.mark.parametrize("command", ["generate", "engine"])
def test_help_is_for_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"trio_engine.cli.{command}")
    with pytest.raises(SystemExit):
        module.run(["--help"])
    shown = capsys.readouterr().out
    assert "--max-num-seqs" in shown
    assert "`" not in shown
    assert "Cli." not in shown


INTERRUPTED_IMPORT = """
import importlib, signal, sys
from trio_engine import __main__ as command_line

real = importlib.import_module

def interrupted(name):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass  # as in the depths of a C library
    print("went on")
    return real(name)

importlib.import_module = interrupted
signal.signal(signal.SIGINT, {handler})
sys.argv = ["trio-engine", "generate", "--help"]
sys.exit(command_line.main())
"""


@pytest.mark.parametrize(
    ("handler", "status"), [("signal.default_int_handler", 130), ("signal.SIG_IGN", 0)]
)
def test_ctrl_c_during_an_import_ends_it_at_once(handler: str, status: int) -> None:
    program = INTERRUPTED_IMPORT.format(handler=handler)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")
    assert ("went on" in done.stdout) == (status == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model"], "trio-engine: model '/no/such/model'"),
        (["--temperature", "9"], "trio-engine: temperature must be 0-2, got 9.0"),
        (["--max-num-seqs", "0"], "trio-engine: max_num_seqs must be 1 or more, got 0"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.run(["hi", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


def test_commands_are_found_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, status in (
        (["--help"], 0),
        (["--version"], 0),
        (["nonsense"], 2),
        (["generate", "hi", "--model", "/no/such/model"], 1),
    ):
        monkeypatch.setattr("sys.argv", ["trio-engine", *arguments])
        assert command_line.main() == status
    shown = capsys.readouterr()
    assert "usage: trio-engine COMMAND" in shown.out
    assert "no command 'nonsense'" in shown.err
