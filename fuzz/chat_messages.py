"""Any messages render by a chat template or raise RequestError, and nothing else.

The input is a JSON or a msgpack object of what ``ChatTemplate.render`` takes; msgpack also says
what a caller may pass in Python and JSON cannot.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import strategies as st

from fuzz.target import Target
from fuzz.wire_inputs import values
from trio_engine.errors import RequestError
from trio_engine.text.chat import ChatTemplate

# As SmolLM2's, which adds a system message, and then what tools and parts of content need.
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_RENDERER = ChatTemplate(_TEMPLATE)
_OWN = {"messages", "add_generation_prompt", "tools"}


def check(data: bytes) -> bool:
    arguments = _decode(data)
    if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
        return False
    messages = arguments.get("messages", [])
    if not isinstance(messages, list):  # no caller's data, but a type error
        return False
    variables = {key: value for key, value in arguments.items() if key not in _OWN}
    try:
        text = _RENDERER.render(
            messages,
            add_generation_prompt=arguments.get("add_generation_prompt", True),
            tools=arguments.get("tools"),
            **variables,
        )
    except RequestError as error:
        assert "\n" not in str(error)
        return False
    assert isinstance(text, str)
    return True


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data) if data[:1] == b"{" else msgspec.msgpack.decode(data)
    except (ValueError, RecursionError, TypeError):  # no input for this decoder
        return None


def _made_up() -> st.SearchStrategy[bytes]:
    contents = st.text(max_size=10) | st.lists(st.fixed_dictionaries({"text": values()}))
    messages = st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant"])},
            optional={"content": contents | values(), "tool_calls": values(), "name": values()},
        ),
        max_size=4,
    )
    arguments = st.fixed_dictionaries(
        {"messages": messages | values()},
        optional={"tools": values(), "add_generation_prompt": values(), "documents": values()},
    )
    return arguments.map(msgspec.msgpack.encode)


TARGET = Target("chat_messages", __doc__, check, _made_up())
