"""Tokenizers built from GGUF metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trio_engine.errors import ModelError
from trio_engine.text.gguf_tokenizer import build_gguf_tokenizer

if TYPE_CHECKING:
    from trio_engine.text.tokenizer import Tokenizer


def build(metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in (metadata | changed).items() if value is not None}
    return build_gguf_tokenizer(kept, "made-up.gguf")


def tokens_of(tokenizer: Tokenizer, metadata: dict[str, Any], text: str) -> list[str]:
    return [metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.encode(text)]


def test_byte_level_merges_in_the_given_order(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = build(byte_level_metadata)
    assert tokens_of(tokenizer, byte_level_metadata, "ab acé") == ["ab", "Ġa", "c", "Ã", "©"]
    assert tokenizer.decode(tokenizer.encode("ab acé\n")) == "ab acé\n"


def test_control_tokens_are_special_and_user_defined_ones_only_whole(
    byte_level_metadata: dict[str, Any],
) -> None:
    tokenizer = build(byte_level_metadata)
    token_ids = tokenizer.encode("<s>a<think>b</s>")
    assert [byte_level_metadata["tokenizer.ggml.tokens"][i] for i in token_ids] == [
        "<s>",
        "a",
        "<think>",
        "b",
        "</s>",
    ]
    assert tokenizer.decode(token_ids) == "a<think>b"
    assert tokenizer.special_token_ids == {0, 1}


def test_tokens_with_a_role_are_special_where_types_are_missing(
    byte_level_metadata: dict[str, Any],
) -> None:
    tokenizer = build(byte_level_metadata, token_type=None)
    assert tokenizer.special_token_ids == {0, 1}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["a"]),
        ({"add_bos_token": True}, ["<s>", "a"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "a", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "a"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["a"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["a"]),
        ({"add_eos_token": True, "eos_token_id": None}, ["a"]),
    ],
)
def test_bos_and_eos_are_added_as_the_flags_say(
    byte_level_metadata: dict[str, Any], flags: dict[str, Any], expected: list[str]
) -> None:
    assert tokens_of(build(byte_level_metadata, **flags), byte_level_metadata, "a") == expected


@pytest.mark.parametrize("text", ["$A", "$B", ":", "a:b", "$"])
def test_a_special_token_may_have_any_text(byte_level_metadata: dict[str, Any], text: str) -> None:
    """The library has a language of its own for what goes around a text."""
    tokens = [text, *byte_level_metadata["tokenizer.ggml.tokens"][1:]]
    tokenizer = build(byte_level_metadata, tokens=tokens, add_bos_token=True, add_eos_token=True)
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [0, *plain, 1]


def test_a_token_that_is_there_twice_hides_no_other(byte_level_metadata: dict[str, Any]) -> None:
    tokens = ["a", *byte_level_metadata["tokenizer.ggml.tokens"]]
    changes = {"tokens": tokens, "token_type": None, "bos_token_id": 1, "eos_token_id": 2}
    tokenizer = build(byte_level_metadata, **changes)
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.token_bytes[tokens.index("12")] == b"12"


def test_special_tokens_can_be_left_out(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = build(byte_level_metadata, add_bos_token=True)
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]


def test_end_of_turn_and_end_of_message_end_an_output_too(
    byte_level_metadata: dict[str, Any],
) -> None:
    tokenizer = build(byte_level_metadata, eot_token_id=2, eom_token_id=1)
    assert tokenizer.eos_token_id == 1
    assert tokenizer.eos_token_ids == (1, 2)


def test_a_vocabulary_without_roles_has_no_bos_or_eos(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = build(byte_level_metadata, bos_token_id=None, eos_token_id=None)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.eos_token_ids == ()


def test_llama3_takes_a_word_that_is_a_token_without_merging(
    byte_level_metadata: dict[str, Any],
) -> None:
    changes = {"merges": ["Ġ a"], "add_bos_token": False}
    merged = build(byte_level_metadata, pre="gpt-2", **changes)
    whole = build(byte_level_metadata, pre="llama-bpe", **changes)
    assert tokens_of(merged, byte_level_metadata, "ab") == ["a", "b"]
    assert tokens_of(whole, byte_level_metadata, "ab") == ["ab"]


def test_sentencepiece_merges_by_score_with_a_space_before_the_first_word(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any]
) -> None:
    tokens = tokens_of(sentencepiece, sentencepiece_metadata, "the cat")
    assert tokens == ["<s>", "▁the", "▁cat"]
    assert sentencepiece.decode(sentencepiece.encode("the cat")) == "the cat"


def test_sentencepiece_falls_back_to_bytes(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any]
) -> None:
    tokens = tokens_of(sentencepiece, sentencepiece_metadata, "é\n")
    assert tokens == ["<s>", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert sentencepiece.decode(sentencepiece.encode("é\n")) == "é\n"


def test_sentencepiece_takes_merges_where_the_file_has_them(
    sentencepiece_metadata: dict[str, Any],
) -> None:
    tokenizer = build(sentencepiece_metadata, merges=["h e"], scores=None, add_bos_token=False)
    assert tokens_of(tokenizer, sentencepiece_metadata, "the") == ["▁", "t", "he"]


def test_sentencepiece_without_a_space_before_the_first_word(
    sentencepiece_metadata: dict[str, Any],
) -> None:
    tokenizer = build(sentencepiece_metadata, add_space_prefix=False, add_bos_token=False)
    assert tokens_of(tokenizer, sentencepiece_metadata, "the") == ["the"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_the_chat_template_comes_along(byte_level_metadata: dict[str, Any]) -> None:
    metadata = byte_level_metadata | {"tokenizer.chat_template": "{{ messages }}"}
    assert build(metadata).chat_template == "{{ messages }}"
    assert build(byte_level_metadata).chat_template is None
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template must be a str, got 1"):
        build(byte_level_metadata | {"tokenizer.chat_template": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"model": None}, "tokenizer.ggml.model None is not supported"),
        ({"pre": "martian"}, "tokenizer.ggml.pre 'martian' is not supported"),
        ({"pre": ["gpt-2"]}, r"tokenizer.ggml.pre \['gpt-2'\] is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing or not a list of str"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing or not a list of str"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or not a list of str"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', not a pair of tokens"),
        ({"merges": ["a b c"]}, "tokenizer.ggml.merges has 'a b c'"),
        ({"merges": ["x y"]}, "tokenizer.ggml.merges do not fit the vocabulary"),
        ({"eos_token_id": 99}, "tokenizer.ggml.eos_token_id 99 is not in the vocabulary"),
        ({"eos_token_id": "x"}, "tokenizer.ggml.eos_token_id 'x' is not in the vocabulary"),
        ({"eot_token_id": -1}, "tokenizer.ggml.eot_token_id -1 is not in the vocabulary"),
    ],
)
def test_damage_is_named_with_the_file(
    byte_level_metadata: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match="made-up.gguf: " + message):
        build(byte_level_metadata, **changes)


def test_scores_must_match_the_tokens(sentencepiece_metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="scores has 2 entries for 273 tokens"):
        build(sentencepiece_metadata, scores=[0.0, 1.0])
