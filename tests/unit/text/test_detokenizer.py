"""Text that arrives token by token is the text of all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, strategies as st

from trio_engine.sampling_params import SamplingParams
from trio_engine.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.text.tokenizer import Tokenizer

# Among the ids from 17 to 300 are all single bytes, so broken characters are frequent.
TOKEN_IDS = st.one_of(st.integers(0, 49151), st.integers(0, 300))
# The vocabulary lacks a few bytes: of some control characters, and those that only rare
# characters begin with. Without "<" there are no special tokens.
ALPHABET = st.characters(
    max_codepoint=0x1FFFF, exclude_categories=["Cc", "Cs"], exclude_characters="<\ufffd"
)
SENTENCEPIECE_TEXT = st.text(alphabet="the cat\n_é日😀", max_size=20)


def pieces(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    """The text of each token, then that of the end."""
    params = SamplingParams(skip_special_tokens=skip)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, params)
    return [detokenizer.append((token_id,)) for token_id in token_ids] + [detokenizer.finish()]


@given(token_ids=st.lists(TOKEN_IDS), skip=st.booleans())
def test_pieces_of_any_tokens_join_to_their_text(
    smollm2: Tokenizer, token_ids: list[int], skip: bool
) -> None:
    joined = "".join(pieces(smollm2, token_ids, skip=skip))
    assert joined == smollm2.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(alphabet=ALPHABET))
def test_text_comes_back_without_broken_characters(smollm2: Tokenizer, text: str) -> None:
    parts = pieces(smollm2, smollm2.encode(text))
    assert "".join(parts) == text


@given(text=st.text(alphabet=ALPHABET), data=st.data())
def test_it_does_not_matter_how_many_tokens_come_at_once(
    smollm2: Tokenizer, text: str, data: st.DataObject
) -> None:
    token_ids = smollm2.encode(text)
    cut = data.draw(st.integers(0, len(token_ids)))
    detokenizer = IncrementalDetokenizer(smollm2, [], SamplingParams())
    first = detokenizer.append(token_ids[:cut])
    second = detokenizer.append(token_ids[cut:])
    assert first + second + detokenizer.finish() == smollm2.decode(token_ids)


@given(text=st.text(alphabet=ALPHABET), data=st.data())
def test_output_continues_the_prompt(smollm2: Tokenizer, text: str, data: st.DataObject) -> None:
    """A character that the prompt begins and the output ends belongs to the output."""
    token_ids = smollm2.encode(text)
    cut = data.draw(st.integers(0, len(token_ids)))
    output = "".join(pieces(smollm2, token_ids[cut:], prompt=token_ids[:cut]))
    assert smollm2.decode(token_ids[:cut]).rstrip("\ufffd") + output == text


def test_half_a_character_is_held_back(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("😀!")
    assert pieces(smollm2, token_ids) == ["", "", "😀", "!", ""]


def test_an_unfinished_character_becomes_a_replacement_at_the_end(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("a😀")[:-1]
    assert pieces(smollm2, token_ids) == ["a", "", "", "\ufffd"]


def test_endless_broken_bytes_come_out_as_they_arrive(smollm2: Tokenizer) -> None:
    continuation = smollm2.encode("😀")[-1]
    assert pieces(smollm2, [continuation] * 5) == ["\ufffd"] * 5 + [""]


def test_special_tokens_are_skipped_or_spelled(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("hi<|im_end|>")
    assert pieces(smollm2, token_ids) == ["hi", "", ""]
    assert pieces(smollm2, token_ids, skip=False) == ["hi", "<|im_end|>", ""]


def test_ids_outside_the_vocabulary_add_nothing(smollm2: Tokenizer) -> None:
    assert pieces(smollm2, [-1, 10**9, *smollm2.encode("hi")]) == ["", "", "hi", ""]


@given(text=SENTENCEPIECE_TEXT, data=st.data())
def test_sentencepiece_output_continues_the_prompt(
    sentencepiece: Tokenizer, text: str, data: st.DataObject
) -> None:
    tokenizer = sentencepiece
    token_ids = tokenizer.encode(text)
    # A text that begins with a space gets no second one, so it loses its own.
    text = text.removeprefix(" ")
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids) == text
    cut = data.draw(st.integers(0, len(token_ids)))
    prompt = tokenizer.decode(token_ids[:cut])
    if "\ufffd" not in prompt:
        output = "".join(pieces(tokenizer, token_ids[cut:], prompt=token_ids[:cut]))
        assert prompt + output == text


def test_only_the_first_word_of_a_text_loses_its_space(sentencepiece: Tokenizer) -> None:
    bos, the, cat = sentencepiece.encode("the cat")
    assert pieces(sentencepiece, [the, cat]) == ["the", " cat", ""]
    assert pieces(sentencepiece, [the, cat], prompt=[bos]) == ["the", " cat", ""]
    assert pieces(sentencepiece, [the, cat], prompt=[bos], skip=False)[0] == " the"
    assert pieces(sentencepiece, [cat], prompt=[bos, the]) == [" cat", ""]


def test_valid_characters_survive_a_broken_byte_beside_them(sentencepiece: Tokenizer) -> None:
    """The library gives up the whole run of byte tokens, which a stream cannot take back."""
    euro = [3 + byte for byte in "€".encode()]
    broken = 3 + 0xFF
    assert sentencepiece.decode([*euro, broken]) == "\ufffd" * 4
    assert pieces(sentencepiece, [*euro, broken]) == ["", "", "€", "\ufffd", ""]


def test_each_token_is_looked_up_once(smollm2: Tokenizer) -> None:
    """The cost is linear: the table is asked once per token and never for earlier ones."""
    asked: list[int] = []

    class Counting(dict[int, bytes]):
        def __getitem__(self, token_id: int) -> bytes:
            asked.append(token_id)
            return smollm2.token_bytes[token_id]

    detokenizer = IncrementalDetokenizer(smollm2, [], SamplingParams())
    detokenizer._token_bytes = Counting()  # type: ignore[assignment]
    token_ids = [100 + index for index in range(1000)]
    for token_id in token_ids:
        detokenizer.append((token_id,))
    assert asked == token_ids
