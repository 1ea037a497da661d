"""What each token adds to an output, and which tokens add nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from trio_engine.errors import ModelError
from trio_engine.structured.compiler import NOT_INSTALLED, GrammarCompiler
from trio_engine.structured.vocabulary import (
    Vocabulary,
    byte_vocabulary,
    load_vocabulary,
    vocabulary_of,
)
from trio_engine.testing.byte_tokenizer import EOS_TOKEN_ID, make_byte_tokenizer

if TYPE_CHECKING:
    from trio_engine.structured.compiler import Grammar


def test_a_byte_has_the_id_after_it() -> None:
    vocabulary = byte_vocabulary(300)
    assert vocabulary.tokens[1 + ord("a")] == b"a"
    assert vocabulary.tokens[256] == b"\xff"
    assert vocabulary.tokens[257:] == [b""] * 43
    assert vocabulary.special_token_ids == [0]
    assert load_vocabulary(None, 300) == vocabulary


def test_bytes_need_a_vocabulary_that_is_large_enough() -> None:
    with pytest.raises(ModelError, match="has 257 tokens, the executor has 256"):
        byte_vocabulary(256)
    byte_vocabulary(257)


@pytest.mark.parametrize("vocab_size", [100, 300, 1000])
def test_a_models_vocabulary_has_a_token_for_each_of_its_rows(vocab_size: int) -> None:
    """A model may have more rows than tokens, or, if its tokenizer has grown, fewer."""
    tokenizer = make_byte_tokenizer()
    vocabulary = vocabulary_of(tokenizer, vocab_size)
    num_tokens = min(vocab_size, tokenizer.vocab_size)
    assert len(vocabulary.tokens) == vocab_size
    assert vocabulary.tokens[:num_tokens] == [tokenizer.token_bytes[i] for i in range(num_tokens)]
    assert (EOS_TOKEN_ID in vocabulary.special_token_ids) == (vocab_size > EOS_TOKEN_ID)
    assert all(token_id < vocab_size for token_id in vocabulary.special_token_ids)


def test_a_special_token_is_found_by_its_text() -> None:
    vocabulary = Vocabulary(tokens=[b"a", b"<x>", b"<x>"], special_token_ids=[2])
    assert vocabulary.special_token_id("<x>") == 2
    assert vocabulary.special_token_id("a") is None


def test_a_vocabulary_goes_through_a_pipe() -> None:
    vocabulary = byte_vocabulary(300)
    data = msgspec.msgpack.encode(vocabulary)
    assert msgspec.msgpack.decode(data, type=Vocabulary) == vocabulary


def test_a_model_that_is_not_there_has_none() -> None:
    with pytest.raises(ModelError, match="/no/such/model"):
        load_vocabulary("/no/such/model", 300)


def test_the_built_in_models_end_token_is_no_text() -> None:
    vocabulary = load_vocabulary("smollm2", 49_152)
    end = vocabulary.special_token_id("<|im_end|>")
    assert end == 2
    grammar: Grammar = GrammarCompiler(vocabulary).compile(
        'start: "<|im_end|>"\n%llguidance {"no_forcing": true}\n'
    )
    matcher = grammar.start([], [])
    matcher.accept(end)
    assert matcher.failure is not None


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModelError, match="pip install") as caught:
        GrammarCompiler(byte_vocabulary(300))
    assert str(caught.value) == NOT_INSTALLED


@pytest.mark.parametrize("tokens", [[b"\xff"], [b"a", b""]])
def test_odd_tokens_are_taken(tokens: list[Any]) -> None:
    GrammarCompiler(Vocabulary(tokens=tokens, special_token_ids=[]))
