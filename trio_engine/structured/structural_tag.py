"""Structural tags: free text in which certain beginnings are followed by what a schema allows.

Layer: structured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.errors import RequestError
from trio_engine.structured.json_schema import schema_rule
from trio_engine.structured.lark import ANY_TEXT, quote

if TYPE_CHECKING:
    from trio_engine.sampling_params import StructuredOutputsParams
    from trio_engine.structured.vocabulary import Vocabulary


class _Structure(msgspec.Struct):
    """One tag: what it begins with, what is inside, what ends it."""

    begin: str
    schema: dict[str, Any]
    end: str


class _StructuralTag(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


def tag_rules(value: Any, params: StructuredOutputsParams, vocabulary: Vocabulary) -> str:
    """A grammar for a text with tags in it, any number of them.

    Text is free up to a trigger, which is an end of text or one special token; from there on one
    of the tags that begin with the trigger must follow.

    Args:
        value: ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``.
        params: options of the schemas.
        vocabulary: to find out which triggers are special tokens.

    Raises:
        RequestError: it has another form, or a tag begins with no trigger.
    """
    tag = _convert(value)
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tag.structures)))})* TEXT"]
    rules.append(f"TEXT: {ANY_TEXT}")
    for index, structure in enumerate(tag.structures):
        trigger = next((t for t in tag.triggers if t and structure.begin.startswith(t)), None)
        if trigger is None:
            raise RequestError(
                f"begin {structure.begin!r} starts with none of the triggers {tag.triggers}"
            )
        rest = quote(structure.begin[len(trigger) :])
        body = f"{rest} {schema_rule(structure.schema, params)} {quote(structure.end)}"
        special = vocabulary.special_token_id(trigger)
        if special is not None:
            rules.append(f"tag_{index}: TEXT <[{special}]> {body}")
        else:
            # Lazy: the text ends where the trigger first comes.
            rules.append(f"trigger_{index}[lazy]: TEXT {quote(trigger)}")
            rules.append(f"tag_{index}: trigger_{index} {body}")
    return "\n".join(rules) + "\n"


def _convert(value: Any) -> _StructuralTag:
    if isinstance(value, dict) and "format" in value:
        raise RequestError(
            "the form with `format` is not supported; use `structures` and `triggers`"
        )
    try:
        tag = msgspec.convert(value, _StructuralTag)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    if not tag.structures:
        raise RequestError("structures must not be empty")
    return tag
