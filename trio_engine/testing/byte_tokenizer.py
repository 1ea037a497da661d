"""A tokenizer for engines without a model: a token is a byte, and one more ends an answer.

Public kit. With it a test writes down prompts and answers as text, and still meets characters of
several tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trio_engine.text.tokenizer import Tokenizer

EOS_TOKEN = "<|end|>"
EOS_TOKEN_ID = 256
"""Behind the bytes, each of which is the id of its own token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_byte_tokenizer() -> Tokenizer:
    """A tokenizer of 257 tokens, with a chat template as plain as can be.

    Example:
        >>> make_byte_tokenizer().encode("é!")
        [195, 169, 33]
    """
    # Imported here: they take longer than all else in this kit.
    import tokenizers

    from trio_engine.text.tokenizer import Tokenizer

    vocabulary = {char: byte for byte, char in enumerate(_spelling())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([EOS_TOKEN])
    return Tokenizer(
        backend,
        special_tokens={"eos_token": EOS_TOKEN},
        chat_template=CHAT_TEMPLATE,
        source="the byte tokenizer",
    )


def _spelling() -> list[str]:
    """How byte-level tokenizers spell each byte: printable ones by themselves."""
    others = iter(range(0x100, 0x200))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]
