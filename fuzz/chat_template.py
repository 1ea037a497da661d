"""Any chat template renders or raises ModelError or RequestError, and nothing else.

A template is a program and may run for ever or fill the memory; that is documented, and not what
is looked for here. So loops, repetitions and numbers of an input are kept small, and one that runs
long all the same is stopped.
"""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

from fuzz.target import Target
from trio_engine.errors import ModelError, RequestError
from trio_engine.text.chat import ChatTemplate

_MAX_CHARS = 2000
_MAX_LOOPS = 2
_MAX_PRODUCTS = 2
# More digits than Python writes: one that Jinja computes as it compiles, and one as it renders.
_HUGE = {"huge": "(9**9999)", "vast": "((8 + messages | length)**9999)"}
_PLAIN = [{"role": "user", "content": "What is <1 & 2>?"}]
_RICH: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is <1 & 2>?"}]},
    {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
_VARIABLES: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": True}

_PIECES = [
    "{% for m in messages %}",
    "{% for i in range(9) recursive %}",
    "{% endfor %}",
    "{% break %}",
    "{% if m.content is string %}",
    "{% elif tools %}",
    "{% else %}",
    "{% endif %}",
    "{{ m.role }}",
    "{{ loop.index0 }}",
    "{{ loop(messages) }}",
    "{% set ns = namespace(x=0) %}",
    "{% set ns.x = ns.x + 1 %}",
    "{% set text %}",
    "{% endset %}",
    "{% macro f(x, y=1) %}",
    "{{ f(x) }}",
    "{% endmacro %}",
    "{% call f(1) %}",
    "{% endcall %}",
    "{{ caller() }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{% block b %}",
    "{{ super() }}",
    "{% endblock %}",
    "{% include 'x' %}",
    "{% extends x %}",
    "{% raw %}",
    "{% endraw %}",
    "{# x #}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception(messages) }}",
    "{{ strftime_now('%d') }}",
    "{{ strftime_now(messages) }}",
    "{{ tools | tojson(indent=2) }}",
    "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ messages[0].__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ ''.join.__self__ }}",
    "{{ '%s' | format(x) }}",
    "{{ '{0.__class__}'.format(x) }}",
    "{{ messages[-1]['content'] + 1 }}",
    "{{ 1 / 0 }}",
    "{{ 9 ** 99 }}",
    "{{ huge }}",
    "{{ raise_exception(vast) }}",
    "{{ range(vast) }}",
    "{{ [1, 2][::0] }}",
    "{{ {}[[]] }}",
    "x",
    "\n  ",
]


def check(data: bytes) -> bool:
    source = bounded(data.decode(errors="replace"))
    rendered = [_renders(source, messages) for messages in (_PLAIN, _RICH)]
    return any(rendered)


def _renders(source: str, messages: list[dict[str, Any]]) -> bool:
    try:
        text = ChatTemplate(source).render(messages, tools=_TOOLS, **_VARIABLES)
    except (ModelError, RequestError) as error:
        assert "\n" not in str(error)
        return False
    assert isinstance(text, str)
    return True


def bounded(source: str) -> str:
    """The template without what could run long: few loops and products, numbers below 100."""
    source = re.sub(r"\d[\d_]+", lambda digits: digits[0][:2], source[:_MAX_CHARS])
    for word, most in (("for", _MAX_LOOPS), ("*", _MAX_PRODUCTS), ("loop(", 1), ("lipsum", 1)):
        kept, *rest = source.split(word)
        source = word.join([kept, *rest[:most]]) + "".join(rest[most:])
    for word, number in _HUGE.items():
        source = source.replace(word, number, 1)
    return source


TARGET = Target(
    "chat_template",
    __doc__,
    check,
    st.lists(st.sampled_from(_PIECES) | st.text(max_size=3), max_size=12).map(
        lambda pieces: "".join(pieces).encode(errors="replace")
    ),
    lambda: [piece.encode() for piece in _PIECES],
    may_run_long=True,
)
