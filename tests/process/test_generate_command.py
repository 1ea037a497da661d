"""``trio-engine generate``: what a user sees of it."""

from __future__ import annotations

import json

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
