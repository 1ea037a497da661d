"""Writes a conversation as the one text that a model was trained on: its chat template.

Pure. Templates come with models and are Jinja, so they are programs. They run in Jinja's
sandbox, on plain JSON data, and their output is limited. Their time is not: ``range`` ends at
100,000, but loops nest. A template from a stranger belongs in a process that can be killed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trio_engine.errors import ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jinja2.parser import Parser

ChatMessage: TypeAlias = Mapping[str, Any]
"""One message in OpenAI's form: ``role``, mostly ``content``, and what else the template knows."""

MAX_RENDERED_CHARS = 1 << 26


class ChatTemplate:
    """A compiled chat template. Compiling takes milliseconds, so keep it.

    Args:
        source: Jinja, as in ``tokenizer_config.json``.

    Raises:
        ModelError: it does not compile.

    Counterpart: ``apply_chat_template`` of transformers; what differs is that data which is no
    JSON is refused, where transformers renders a placeholder.
    """

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None
        except Exception as error:  # too deep for Python, or a constant that it cannot write
            raise ModelError(f"chat template: {_one_line(error)}") from None

    def render(
        self,
        messages: Sequence[ChatMessage],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: at least one, oldest first; a key whose value is None counts as absent.
            add_generation_prompt: end with the start of the assistant's answer.
            tools: functions that the model may call, as JSON schemas.
            variables: what else the template reads: special tokens, options such as
                ``enable_thinking``.

        Raises:
            RequestError: the template refuses the messages or cannot work with them.
            ModelError: the template tries to leave its sandbox.
        """
        values = {
            "documents": None,  # templates ask whether it is there
            **variables,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            plain = {name: _plain(value, name) for name, value in values.items()}
            plain["messages"] = _plain_messages(messages)
        except RecursionError:
            raise RequestError("messages or variables are nested too deeply") from None
        return self._run(plain)

    def _run(self, values: dict[str, Any]) -> str:
        try:
            return "".join(_limited(self._template.generate(values)))
        except jinja2.exceptions.SecurityError as error:
            raise ModelError(f"chat template is unsafe: {_one_line(error)}") from None
        except Exception as error:  # the template is a program: it can raise anything
            raise RequestError(
                f"messages do not fit the chat template: {_one_line(error)}"
            ) from error


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise jinja2.TemplateError(f"more than {MAX_RENDERED_CHARS} characters of output")
        yield piece


def render_chat(
    template: str,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Compiles and renders at once; see ``ChatTemplate``."""
    return ChatTemplate(template).render(
        messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
    )


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only renders them."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja types it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    # Made a text here, where an object that has none is the template's error like any other.
    raise jinja2.TemplateError(f"{message}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("messages must not be empty")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name} must be a mapping with a role, got {message!r:.100}")
    return {
        _plain_key(key, name): _plain(value, f"{name}.{key}")
        for key, value in message.items()
        if value is not None
    }


def _plain(value: Any, name: str) -> Any:
    """Copies JSON data: a template must not reach objects, which may do more than hold data."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a StrEnum, say
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain_key(key, name): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    raise RequestError(f"{name} must be JSON data, got {type(value).__name__}")


def _plain_key(key: Any, name: str) -> Any:
    if key is None or isinstance(key, str | int | float):
        return _plain(key, name)
    raise RequestError(f"{name} must be JSON data, got a key of type {type(key).__name__}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
