"""Bytes of single tokens under each supported decoder."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from trio_engine.errors import ModelError
from trio_engine.text.token_bytes import TokenBytes, vocabulary_end

VOCAB = {"a": 0, "▁b": 1, "<0xE2>": 2, "Ġé": 3, "x y": 4, "<0xZZ>": 5, "Ċ": 6}


def token_bytes(decoder: decoders.Decoder | None) -> TokenBytes:
    backend = Tokenizer(models.BPE(VOCAB, []))
    if decoder is not None:
        backend.decoder = decoder
    return TokenBytes(backend, "made-up")


def all_bytes(table: TokenBytes) -> list[bytes]:
    return [table[token_id] for token_id in range(len(VOCAB))]


def test_byte_level_tokens_are_bytes_unless_a_character_is_outside_the_alphabet() -> None:
    table = token_bytes(decoders.ByteLevel())
    assert all_bytes(table) == [b"a", "▁b".encode(), b"<0xE2>", b" \xe9", b"x y", b"<0xZZ>", b"\n"]
    assert not table.strips_leading_space


def test_the_byte_alphabet_is_the_librarys() -> None:
    from tokenizers import pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    table = TokenBytes(backend, "made-up")
    assert {table[i] for i in range(256)} == {bytes([byte]) for byte in range(256)}


def test_sentencepiece_tokens_with_byte_fallback() -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    table = token_bytes(decoders.Sequence(steps))
    assert all_bytes(table)[:3] == [b"a", b" b", b"\xe2"]
    assert table[5] == b"<0xZZ>"
    assert not table.strips_leading_space
    steps.append(decoders.Strip(" ", 1, 0))
    assert token_bytes(decoders.Sequence(steps)).strips_leading_space


def test_metaspace_tokens() -> None:
    table = token_bytes(decoders.Metaspace())
    assert all_bytes(table)[:3] == [b"a", b" b", b"<0xE2>"]
    assert table.strips_leading_space
    assert not token_bytes(decoders.Metaspace(prepend_scheme="never")).strips_leading_space


def test_without_a_decoder_tokens_are_joined_by_spaces() -> None:
    table = token_bytes(None)
    assert table[0] == b" a"
    assert table.strips_leading_space


@pytest.mark.parametrize("token_id", [-1, 7, 2**40])
def test_unknown_ids_have_no_bytes_and_take_no_memory(token_id: int) -> None:
    table = token_bytes(decoders.ByteLevel())
    assert table[token_id] == b""
    assert not table


def test_gaps_between_ids_have_no_bytes_and_hide_no_token() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 5}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["c"])
    end = vocabulary_end(backend)
    table = TokenBytes(backend, "made-up")
    assert [table[i] for i in range(end)] == [b"a", b"", b"c", b"", b"", b"b"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("_", 1, 0)]),
    ],
)
def test_decoders_that_do_more_than_spelling_are_refused(decoder: decoders.Decoder) -> None:
    with pytest.raises(ModelError, match=r'made-up: decoder \{"type": .* is not supported'):
        token_bytes(decoder)
