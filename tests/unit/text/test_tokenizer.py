"""The built-in model's tokenizer against recorded answers.

Recorded with transformers 5.24 on the same file, its word split set to the one that the file
names; ``test_oracle.py`` asks transformers itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trio_engine.checkpoint import ModelFiles
from trio_engine.errors import ModelError, RequestError
from trio_engine.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

RECORDED = [
    ("", []),
    ("Hello world", [19556, 905]),
    (
        "  two  spaces\tand\ttabs\r\n\n",
        [216, 827, 216, 5600, 197, 397, 197, 100, 7366, 201, 1116],
    ),
    ("year 2024: 3.14", [3610, 216, 34, 32, 34, 36, 42, 216, 35, 30, 33, 36]),
    ("    0   12", [289, 32, 333, 33, 34]),
    (
        "na\xefve caf\xe9 \u2014 \u201cquotes\u201d",
        [3546, 46494, 37366, 1841, 619, 385, 2346, 573],
    ),
    (
        "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
        [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    ),
    (
        "\U0001f600\U0001f468\u200d\U0001f469\u200d",
        [10813, 242, 218, 10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231],
    ),
    ("don't WE'LL", [12420, 982, 26587, 23, 16421]),
    (
        "def f(x):\n    return x ** 2\n",
        [1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 198],
    ),
    ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
    ("<|im_start|", [44, 108, 306, 79, 3738, 108]),
    ("e\u0301\u200b\xa0\u3000", [85, 151, 219, 321, 229, 15442, 12109, 218]),
    ("\x00\ufffd", [190, 24211]),
]


@pytest.mark.parametrize(("text", "token_ids"), RECORDED)
def test_encodes_as_recorded_and_decodes_back(
    smollm2: Tokenizer, text: str, token_ids: list[int]
) -> None:
    assert smollm2.encode(text) == token_ids
    assert smollm2.decode(token_ids, skip_special_tokens=False) == text


def test_knows_the_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.eos_token_ids) == (1, 2, (2,))
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.vocab_size == 49152


def test_decoding_skips_special_tokens_unless_told_otherwise(smollm2: Tokenizer) -> None:
    assert smollm2.decode([1, 19556, 905, 2]) == "Hello world"
    assert smollm2.decode([19556, 2], skip_special_tokens=False) == "Hello<|im_end|>"


def test_repr_names_the_source(smollm2: Tokenizer) -> None:
    assert "49152 tokens" in repr(smollm2)
    assert ".gguf" in repr(smollm2)


def test_a_lone_surrogate_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"text must be valid Unicode, got 'a\\ud800'"):
        smollm2.encode("a\ud800")


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_missing_checkpoint_is_named(kind: str, tmp_path: Path) -> None:
    files = ModelFiles(kind=kind, path=tmp_path / "absent")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="absent"):
        load_tokenizer(files)
