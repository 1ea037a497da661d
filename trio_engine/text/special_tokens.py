"""Puts special tokens around what a tokenizer encodes.

Pure. Both kinds of checkpoint say in flags of their own that BOS or EOS is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import processors

if TYPE_CHECKING:
    from collections.abc import Mapping

    import tokenizers


def surround_with_special_tokens(
    backend: tokenizers.Tokenizer,
    special_tokens: Mapping[str, str],
    *,
    add_bos: bool,
    add_eos: bool,
) -> None:
    """Makes BOS and EOS come first and last, or not; without such a token the flag is void.

    Args:
        backend: changed in place.
        special_tokens: role to text; all are in the vocabulary.
        add_bos: put ``bos_token`` first.
        add_eos: put ``eos_token`` last.
    """
    before = ["bos_token"] if add_bos and "bos_token" in special_tokens else []
    after = ["eos_token"] if add_eos and "eos_token" in special_tokens else []
    # Named by role: the text of a token could mean something in a template, as "$B" and ":" do.
    pieces = [
        {"id": role, "ids": [backend.token_to_id(text)], "tokens": [text]}
        for role, text in ((role, special_tokens[role]) for role in (*before, *after))
    ]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=pieces
    )
