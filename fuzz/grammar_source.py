"""Any structured outputs become the source of a grammar or raise RequestError, and nothing else.

The input is a kind and a text. What the library makes of the source is not looked for here: it may
end the process, which is why the engine has another process try it first.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from fuzz.target import Target, join, split
from trio_engine.errors import RequestError
from trio_engine.sampling_params import StructuredOutputsParams
from trio_engine.structured.lark import OPTIONS
from trio_engine.structured.source import grammar_source
from trio_engine.structured.vocabulary import byte_vocabulary

_KINDS = ["json", "regex", "choice", "grammar", "structural_tag"]
_VOCABULARY = byte_vocabulary(300)
_MAX_BYTES = 10_000

_PIECES = [
    'root ::= "a" | b+\nb ::= [^a-z\\n] ("x" | \'y\'){2,3} # c\n',
    "root ::= (root)? .\n",
    "start: A\nA: /x/\n",
    '"\\u0041\\x42\\""',
    "[\\]-^]",
    "::=",
    "{1,}",
    "(((",
    "{",
    "}",
    "\n",
    '{"type": "object", "properties": {"a": {"$ref": "#"}}, "x-guidance": {}}',
    '{"structures": [{"begin": "<f", "schema": {}, "end": ">"}], "triggers": ["<"]}',
    '{"format": 1}',
    "\\d[\\w\\s]/",
    "\ud800",
]
_SEEDS = [
    ("json", _PIECES[11]),
    ("regex", _PIECES[14]),
    ("choice", "yes\nno"),
    ("grammar", _PIECES[0]),
    ("grammar", _PIECES[2]),
    ("structural_tag", _PIECES[12]),
]


def check(data: bytes) -> bool:
    kind_data, text_data, *_ = [*split(data), b"", b""]
    kind = _KINDS[len(kind_data) % len(_KINDS)]
    try:
        text = text_data.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        text = text_data.decode(errors="replace")
    return _translates(kind, text)


def _translates(kind: str, text: str) -> bool:
    fields: dict[str, Any] = {kind: text.split("\n") if kind == "choice" else text}
    fields["disable_additional_properties"] = len(text) % 3 == 0
    try:
        params = StructuredOutputsParams(**fields)
        source = grammar_source(params, _VOCABULARY, _MAX_BYTES)
    except RequestError as error:
        assert str(error)
        return False
    assert source.endswith(OPTIONS)
    assert len(source.encode()) <= _MAX_BYTES
    if kind == "json":
        assert json.loads(source[len("start: %json ") : -len(OPTIONS)]) is not None
    return True


def _input(kind: str, text: str) -> bytes:
    return join([b"x" * _KINDS.index(kind), text.encode(errors="surrogatepass")])


TARGET = Target(
    "grammar_source",
    __doc__,
    check,
    st.builds(
        _input,
        st.sampled_from(_KINDS),
        st.lists(st.sampled_from(_PIECES) | st.text(max_size=3), max_size=8).map("".join),
    ),
    lambda: [_input(kind, text) for kind, text in _SEEDS],
)
