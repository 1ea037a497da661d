"""``EngineConfig`` as command-line flags and back, from the struct's own fields.

Pure. The launcher writes these flags and the engine's command reads them; both go through the one
table below, so a new option cannot be known to one side only.
"""

from __future__ import annotations

import argparse
import re
import types
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from trio_engine.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


_UNITS = {"_s": "SECONDS", "_ms": "MS", "_bytes": "BYTES", "_tokens": "TOKENS"}
"""By the end of a field's name, what its value counts."""


class _Option(NamedTuple):
    """One field of the config as a flag: ``max_num_seqs`` is ``--max-num-seqs``."""

    name: str
    flag: str
    value_type: type
    choices: tuple[Any, ...] | None
    default: Any
    help: str


def config_to_arguments(config: EngineConfig) -> list[str]:
    """The flags that differ from the defaults, in the order of the fields.

    Each is one word, ``--flag=value``: a value that starts with a dash stays a value.
    """
    return [
        _to_word(option, getattr(config, option.name))
        for option in _options()
        if getattr(config, option.name) != option.default
    ]


def add_engine_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds a flag for each field of ``EngineConfig``, with its documentation as help.

    A field in seconds loses its ``_s``: ``shutdown_timeout_s`` is ``--shutdown-timeout``.

    Args:
        parser: which gets them.
        defaults: of fields for which the command has another one than ``EngineConfig``.
    """
    group = parser.add_argument_group("engine options")
    for option in _options():
        default = defaults.get(option.name, option.default)
        if option.value_type is bool:
            added = group.add_argument(
                option.flag,
                dest=option.name,
                action=argparse.BooleanOptionalAction,
                default=default,
            )
        else:
            added = group.add_argument(
                option.flag,
                dest=option.name,
                type=option.value_type,
                choices=option.choices,
                default=default,
                metavar=None if option.choices else _metavar(option),
            )
        # Not by the call: a BooleanOptionalAction would add a default of its own, as True.
        added.help = option.help + _default_note(default)


def config_from_arguments(namespace: argparse.Namespace) -> EngineConfig:
    """The config that parsed flags stand for; other attributes of the namespace are left alone.

    Raises:
        ConfigError: a value out of range.
    """
    return EngineConfig(**{option.name: getattr(namespace, option.name) for option in _options()})


def _to_word(option: _Option, value: Any) -> str:
    if option.value_type is bool:
        return option.flag if value else option.flag.replace("--", "--no-", 1)
    return f"{option.flag}={value}"


def _metavar(option: _Option) -> str:
    """What stands for a value in the help: its unit where it has one."""
    for ending, unit in _UNITS.items():
        if option.name.endswith(ending):
            return unit
    return {int: "N", float: "X"}.get(option.value_type, option.name.upper())


def _default_note(default: Any) -> str:
    if default is None:  # its text says what holds then
        return ""
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else f"{default}"
    return f" (default: {shown})"


def _options() -> Iterator[_Option]:
    helps = _field_docs()
    for field in msgspec.structs.fields(EngineConfig):
        value_type, choices = _value_type(field.type)
        yield _Option(
            field.name,
            _flag_of(field.name),
            value_type,
            choices,
            field.default,
            helps.get(field.name, ""),
        )


def _value_type(annotation: Any) -> tuple[type, tuple[Any, ...] | None]:
    """``int | None`` is int, a Literal is the type of its words with these as choices."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (arm for arm in get_args(annotation) if arm is not types.NoneType)
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return type(choices[0]), choices
    return annotation, None


def _field_docs() -> dict[str, str]:
    """Each field's text in the struct's docstring; empty when docstrings are stripped."""
    _, _, listed = (EngineConfig.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", listed, flags=re.MULTILINE)
    return {name: _help_of(text) for name, text in entries}


def _help_of(text: str) -> str:
    """A docstring's text for a terminal: in one line, without its markup, and fields as flags."""
    line = re.sub(r"``(\w+)``", _as_flag, " ".join(text.split())).replace("``", "")
    # argparse formats help with %: a literal one in the text would be read as a field.
    return line.removesuffix(".").replace("%", "%%")


def _as_flag(found: re.Match[str]) -> str:
    name = found[1]
    return _flag_of(name) if name in EngineConfig.__struct_fields__ else name


def _flag_of(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")
