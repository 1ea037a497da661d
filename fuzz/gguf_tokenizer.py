"""Any GGUF file gives a tokenizer that works, or raises ModelError by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from fuzz.model_inputs import folder_of, gguf_file
from fuzz.target import Target
from fuzz.wire_inputs import changed_frames
from trio_engine.errors import ModelError
from trio_engine.text.gguf_tokenizer import read_gguf_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_engine.text.tokenizer import Tokenizer

_TEXT = "ab <s>the 12 é\n"
_PREFIX = "tokenizer.ggml."
_BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "pre": "llama-bpe",
    "tokens": ["<s>", "</s>", "<think>", *"abth1Ġ", "ab", "Ġa"],
    "token_type": [3, 3, 4] + [1] * 8,
    "merges": ["a b", "Ġ a"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "eot_token_id": 2,
    "add_bos_token": True,
    "add_eos_token": True,
}
_SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "t", "h", "e", "th", "the", "▁the"],
    "token_type": [2, 3, 3, 6] + [1] * 7,
    "scores": [0.0] * 4 + [-float(rank) for rank in range(7)],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
    "padding_token_id": 0,
    "add_space_prefix": True,
}


def check(data: bytes) -> bool:
    with folder_of({"model.gguf": data}) as folder:
        path = folder / "model.gguf"
        try:
            tokenizer = read_gguf_tokenizer(path)
        except ModelError as error:
            assert str(error).startswith(str(path))
            return False
    check_usable(tokenizer)
    return True


def check_usable(tokenizer: Tokenizer) -> None:
    """A tokenizer that was accepted encodes and decodes, by whole texts and by tokens."""
    token_ids = tokenizer.encode(_TEXT)
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in token_ids)
    plain = tokenizer.encode(_TEXT, add_special_tokens=False)
    # Flags add at most BOS and EOS, around what is there anyway.
    assert len(token_ids) - len(plain) in (0, 1, 2)
    assert any(token_ids[skip : skip + len(plain)] == plain for skip in (0, 1))
    tokenizer.decode(token_ids)
    for token_id in range(min(tokenizer.vocab_size, 1000)):
        assert isinstance(tokenizer.token_bytes[token_id], bytes)


def _gguf(values: dict[str, Any]) -> bytes:
    return gguf_file({_PREFIX + key: value for key, value in values.items()}, {})


def make_seeds() -> Iterator[bytes]:
    template = {"tokenizer.chat_template": "{{ messages }}"}
    for values in (_BYTE_LEVEL, _SENTENCEPIECE):
        yield gguf_file({_PREFIX + key: value for key, value in values.items()} | template, {})
    yield _gguf(_BYTE_LEVEL | {"pre": "smollm", "add_bos_token": False})
    merged = {key: value for key, value in _SENTENCEPIECE.items() if key != "scores"}
    yield _gguf(merged | {"merges": ["t h", "th e"], "add_space_prefix": False})


def _changed_seeds() -> st.SearchStrategy[bytes]:
    seeds = st.sampled_from(list(make_seeds()))
    return seeds.flatmap(lambda seed: changed_frames([seed])).map(lambda frames: frames[0])


@st.composite
def _made_up(draw: st.DrawFn) -> bytes:
    """A vocabulary with other texts: those that mean something to the library among them."""
    values = dict(draw(st.sampled_from([_BYTE_LEVEL, _SENTENCEPIECE])))
    words = st.sampled_from(["$A", "$B", "$", "$A:1", "a:b", ":", "", " ", "<0xFF>", "<0xZZ>"])
    words |= st.sampled_from(values["tokens"]) | st.text(st.characters(codec="utf-8"), max_size=3)
    tokens = list(values["tokens"])
    for index in draw(st.lists(st.integers(0, len(tokens) - 1), max_size=3)):
        tokens[index] = draw(words)
    values["tokens"] = tokens
    for key in draw(st.lists(st.sampled_from(sorted(values)), max_size=1)):
        values[key] = draw(st.integers(0, 20) | st.booleans() | words | st.floats(width=32))
    return _gguf(values)


TARGET = Target("gguf_tokenizer", __doc__, check, _changed_seeds() | _made_up(), make_seeds)
