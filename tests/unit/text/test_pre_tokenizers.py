"""Word splits against what the models' own tokenizers do."""

from __future__ import annotations

import pytest

from trio_engine.text.pre_tokenizers import WORD_SPLITS


def words(name: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in WORD_SPLITS[name].build().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", "I|'m| 1234|\n| fooBar|/|\n"),
        ("smollm", "I|'m| |1|2|3|4|\n| fooBar|/|\n"),
        ("llama-bpe", "I|'m| |123|4|\n| fooBar|/\n"),
        ("qwen2", "I|'m| |1|2|3|4|\n| fooBar|/\n"),
        ("qwen35", "I|'m| |1|2|3|4|\n| fooBar|/\n"),
        ("tekken", "I|'m| |1|2|3|4|\n| foo|Bar|/\n"),
        ("gpt-4o", "I'm| |123|4|\n| foo|Bar|/\n"),
    ],
)
def test_words_are_cut_as_the_name_says(name: str, expected: str) -> None:
    assert words(name, "I'm 1234\n fooBar/\n") == expected.split("|")


def test_runs_of_spaces_before_digits_stay_whole_where_digits_are_cut_first() -> None:
    assert words("gpt-2", "x   12") == ["x", "  ", " 12"]
    assert words("smollm", "x   12") == ["x", "   ", "1", "2"]


def test_marks_belong_to_the_word_only_for_qwen35() -> None:
    assert words("qwen35", "e\u0301a") == ["e\u0301a"]
    assert words("qwen2", "e\u0301a") == ["e", "\u0301a"]


def test_only_llama3_and_tekken_take_whole_words_and_add_bos() -> None:
    names = {name for name, split in WORD_SPLITS.items() if split.ignores_merges}
    assert {"llama-bpe", "tekken"} <= names
    assert names == {name for name, split in WORD_SPLITS.items() if split.adds_bos}
    assert not names & {"gpt-2", "smollm", "qwen2", "gpt-4o", "dbrx"}
