"""Tokenizers for the tests of ``trio_engine.text``: the built-in model's and small made-up ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trio_engine.checkpoint import locate_model
from trio_engine.errors import ModelError
from trio_engine.text.gguf_tokenizer import build_gguf_tokenizer
from trio_engine.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from trio_engine.checkpoint import ModelFiles

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    try:
        return locate_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2_files)


@pytest.fixture
def byte_level_metadata() -> dict[str, Any]:
    """A byte-level vocabulary of a few words, with BOS, EOS and a word that a user defined."""
    tokens = ["<s>", "</s>", "<think>", *"abcdeé 0123".replace(" ", "Ġ"), "Ċ", "Ã", "©"]
    tokens += ["ab", "Ġa", "ĠĠ", "12"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["a b", "Ġ a", "Ġ Ġ", "1 2"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def made_up_sentencepiece() -> dict[str, Any]:
    """A SentencePiece vocabulary with byte fallback, scores and no merges."""
    words = ["▁the", "the", "he", "▁t", "▁", "t", "h", "e", "c", "a", "▁c", "at", "▁cat"]
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "<tool>", *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * len(words),
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(rank) for rank in range(len(words))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture
def sentencepiece_metadata() -> dict[str, Any]:
    return made_up_sentencepiece()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return build_gguf_tokenizer(made_up_sentencepiece(), "made-up.gguf")
