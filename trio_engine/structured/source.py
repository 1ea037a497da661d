"""What a request asks for, as one source text in the library's grammar language.

Layer: structured. The language is a dialect of Lark's with JSON schemas inside of it, so that one
text can hold every kind. vLLM's names of backends are accepted and all mean this one. Used where a
``GrammarCompiler`` is, so the library is there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trio_engine.errors import RequestError
from trio_engine.structured.ebnf import ebnf_to_lark
from trio_engine.structured.json_schema import decode_json, schema_rule
from trio_engine.structured.lark import OPTIONS, quote
from trio_engine.structured.structural_tag import tag_rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.sampling_params import StructuredOutputsParams
    from trio_engine.structured.vocabulary import Vocabulary

_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def grammar_source(params: StructuredOutputsParams, vocabulary: Vocabulary, max_bytes: int) -> str:
    """Translates what a request asks for.

    Args:
        params: of which one kind is set.
        vocabulary: its special tokens may be what a structural tag begins with.
        max_bytes: of the source; what it costs to use a grammar may grow with it.

    Raises:
        RequestError: it cannot be translated, or is too large. What the library makes of it is
            seen only when it is compiled.
    """
    try:
        source = _TRANSLATORS[params.kind](params, vocabulary) + OPTIONS
        num_bytes = len(source.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"it is no Unicode: {error}") from None
    except RecursionError:
        raise RequestError("it nests too deeply") from None
    if num_bytes > max_bytes:
        raise RequestError(f"it has {num_bytes} bytes, at most {max_bytes} are served")
    return source


def _json(params: StructuredOutputsParams, _vocabulary: Vocabulary) -> str:
    schema = params.json
    if isinstance(schema, str):
        schema = decode_json(schema)
    return f"start: {schema_rule(schema, params)}\n"


def _json_object(params: StructuredOutputsParams, _vocabulary: Vocabulary) -> str:
    return f"start: {schema_rule({'type': 'object'}, params)}\n"


def _regex(params: StructuredOutputsParams, _vocabulary: Vocabulary) -> str:
    from llguidance import regex_to_lark

    assert params.regex is not None
    # \d, \w and \s are ASCII, as vLLM's default backend has them.
    return f"start: TEXT\nTEXT: /{regex_to_lark(params.regex, 'dws')}/\n"


def _choice(params: StructuredOutputsParams, _vocabulary: Vocabulary) -> str:
    assert params.choice is not None
    # A terminal, not a rule: one automaton for all of them, however many.
    return f"start: CHOICE\nCHOICE: {' | '.join(map(quote, params.choice))}\n"


def _grammar(params: StructuredOutputsParams, _vocabulary: Vocabulary) -> str:
    assert params.grammar is not None
    if _EBNF_RULE.search(params.grammar):
        return ebnf_to_lark(params.grammar)
    return params.grammar + "\n"


def _structural_tag(params: StructuredOutputsParams, vocabulary: Vocabulary) -> str:
    assert params.structural_tag is not None
    return tag_rules(decode_json(params.structural_tag), params, vocabulary)


_TRANSLATORS: dict[str, Callable[[StructuredOutputsParams, Vocabulary], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
