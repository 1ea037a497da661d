"""What ``--help`` says: every option with its default and unit, in words of the command line."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest

from trio_engine.__main__ import COMMANDS, usage
from trio_engine.engine_arguments import add_engine_arguments
from trio_engine.testing import check_engine_command

PYTHON_WORDS = re.compile(r"\b(None|True|False|STR|INT|FLOAT)\b|`|\w_s\b")


def parsers_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A command and those below it."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found.extend(parsers_of(below))
    return found


def all_parsers() -> list[argparse.ArgumentParser]:
    own = [importlib.import_module(f"trio_engine.cli.{name}")._parser() for name in COMMANDS]
    own.append(check_engine_command._parser())
    return [below for parser in own for below in parsers_of(parser)]


def name_of(parser: argparse.ArgumentParser) -> str:
    return parser.prog


@pytest.mark.parametrize("parser", all_parsers(), ids=name_of)
def test_help_describes_a_command_and_has_no_words_of_python(
    parser: argparse.ArgumentParser,
) -> None:
    assert parser.description
    assert PYTHON_WORDS.findall(parser.format_help()) == []


@pytest.mark.parametrize("parser", all_parsers(), ids=name_of)
def test_help_names_the_default_of_each_option_that_has_one(
    parser: argparse.ArgumentParser,
) -> None:
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action
        has_default = action.default not in (None, argparse.SUPPRESS, [])
        if has_default and not isinstance(action, argparse._StoreTrueAction):
            assert "(default: " in str(action.help), action.option_strings


def test_engine_options_name_their_units_and_each_other_as_flags() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser, null_step_ms=2.5, enable_lora=True)
    by_flag = {action.option_strings[0]: action for action in parser._actions}
    assert by_flag["--shutdown-timeout"].metavar == "SECONDS"
    assert by_flag["--null-step-ms"].metavar == "MS"
    assert by_flag["--max-grammar-bytes"].metavar == "BYTES"
    assert str(by_flag["--null-step-ms"].help).endswith(" (default: 2.5)")
    assert str(by_flag["--enable-lora"].help).endswith(" (default: on)")
    assert str(by_flag["--log-stats"].help).endswith(" (default: on)")
    assert "neither this nor --kv-cache-bytes" in str(by_flag["--num-blocks"].help)
    assert "as --model is given" in str(by_flag["--tokenizer"].help)


def test_the_list_of_commands_says_where_their_options_are() -> None:
    assert usage().endswith("--help shows a command's options, with defaults and units.")
