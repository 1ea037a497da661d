"""Chat templates: what they may do, what they are given, and how they fail."""

from __future__ import annotations

import datetime
import enum
from typing import Any

import pytest

from trio_engine.errors import ModelError, RequestError
from trio_engine.text import chat
from trio_engine.text.chat import ChatTemplate, render_chat

USER = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: Any = USER, **options: Any) -> str:
    return render_chat(template, messages, **options)


def test_a_conversation_is_written_in_order() -> None:
    template = (
        "{%- for m in messages %}\n"
        "    {{- bos_token if loop.first }}[{{ m['role'] }}]{{ m.content }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}[assistant]{% endif %}"
    )
    messages = [*USER, {"role": "assistant", "content": "Hello <b>"}]
    assert (
        render(template, messages, bos_token="<s>") == "<s>[user]Hi[assistant]Hello <b>[assistant]"
    )
    text = render(template, messages, bos_token="<s>", add_generation_prompt=False)
    assert text.endswith("Hello <b>")


class _Role(enum.StrEnum):
    USER = "user"


def test_enumerated_strings_are_plain_to_the_template() -> None:
    messages = [{"role": _Role.USER, "content": "x"}]
    assert render("{{ messages[0].role }} {{ messages[0].role.name }}", messages) == "user "


def test_block_lines_leave_no_trace() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loop_controls_and_generation_marks_are_known() -> None:
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}!"
    assert render(template) == "Hi!"


def test_tojson_writes_json_not_html() -> None:
    tools = [{"name": "f", "description": "a < b & é"}]
    assert render("{{ tools | tojson }}", tools=tools) == (
        '[{"name": "f", "description": "a < b & é"}]'
    )
    assert render("{{ [1, 2] | tojson(indent=1) }}") == "[\n 1,\n 2\n]"


def test_strftime_now_is_the_local_date() -> None:
    before = datetime.datetime.now().strftime("%Y")
    assert render("{{ strftime_now('%Y') }}") in {before, str(int(before) + 1)}


def test_tools_and_documents_are_none_unless_given() -> None:
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ documents[0] }}", documents=["x"]) == "x"


def test_a_key_without_value_counts_as_absent() -> None:
    messages: list[Any] = [{"role": "assistant", "content": None, "tool_calls": []}]
    assert render("{{ 'content' in messages[0] }}", messages) == "False"


def test_the_template_works_on_a_copy() -> None:
    messages: list[Any] = [{"role": "user", "content": ({"type": "text", "text": "x"},)}]
    assert render("{{ messages[0].content[0].text }}", messages) == "x"
    with pytest.raises(ModelError, match="chat template is unsafe"):
        render("{{ messages.append(1) }}", messages)
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "chat template: roles must alternate"),
        ("{{ 'x' + messages[0]['name'] }}", "chat template: .*has no attribute 'name'"),
        ("{{ messages[0].content + 1 }}", "chat template: can only concatenate str"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{{ range(10 ** 9) }}", "chat template: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template: maximum recursion"),
        ("{{ cycler() }}", "chat template: at least one item"),
        ("{{ raise_exception((8 + messages | length) ** 9999) }}", "chat template: Exceeds the"),
    ],
)
def test_messages_that_do_not_fit_are_refused_in_one_line(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must not be empty"),
        (
            [{"content": "x"}],
            r"messages\[0\] must be a mapping with a role, got \{'content': 'x'\}",
        ),
        ([{"role": 1, "content": "x"}], r"messages\[0\] must be a mapping with a role"),
        ([*USER, "Hi"], r"messages\[1\] must be a mapping with a role, got 'Hi'"),
        (
            [{"role": "user", "content": b"x"}],
            r"messages\[0\].content must be JSON data, got bytes",
        ),
        (
            [{"role": "user", "content": [{"image": object()}]}],
            r"messages\[0\].content\[0\].image must be JSON data, got object",
        ),
        (
            [{"role": "user", "content": {("x",): 1}}],
            r"messages\[0\].content must be JSON data, got a key of type tuple",
        ),
        (
            [{"role": "user", object: 1}],
            r"messages\[0\] must be JSON data, got a key of type type",
        ),
    ],
)
def test_what_is_no_message_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render("x", messages)


def test_messages_nested_too_deeply_are_refused() -> None:
    content: list[Any] = []
    content.append(content)
    with pytest.raises(RequestError, match="nested too deeply"):
        render("x", [{"role": "user", "content": content}])


@pytest.mark.parametrize("name", ["__class__", "__init__"])
def test_a_template_cannot_reach_out_of_its_sandbox(name: str) -> None:
    with pytest.raises(ModelError, match="chat template is unsafe"):
        render("{{ messages[0].content." + name + ".x }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% if %}", "chat template, line 2: "),
        ("{{ x | no_such_filter }}", "chat template, line 1: No filter named"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, "chat template: "),
        ("{{ 9 ** 9999 }}", "chat template: Exceeds the limit"),
    ],
)
def test_a_template_that_does_not_compile_is_the_models_fault(template: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ChatTemplate(template)


def test_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 1000)
    loop = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="more than 1000 characters of output"):
        render(loop)


def test_variables_may_have_the_names_of_the_methods_own() -> None:
    template = ChatTemplate("{{ x }}{{ messages | length }}")
    assert template.render(USER, x=1, self="s", messages=[]) == "11"
