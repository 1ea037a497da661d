"""What each kind of structured output allows, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.unit.structured.grammar_parts import (
    COMPILER,
    VOCABULARY,
    accepts,
    compile_grammar,
    follows,
    source_of,
)
from trio_engine.errors import RequestError
from trio_engine.sampling_params import StructuredOutputsParams
from trio_engine.structured.source import grammar_source
from trio_engine.structured.vocabulary import Vocabulary

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)], ids=["map", "text"])
def test_a_schema_may_be_a_map_or_text(schema: Any) -> None:
    assert accepts('{"name": "Ann", "age": 7}', json=schema)
    assert not accepts('{"name": "Annika", "age": 7}', json=schema)
    assert not accepts('{"name": "Ann"}', json=schema)


def test_json_may_have_whitespace_unless_it_must_not() -> None:
    spaced = '{ "name" : "A",\n "age": 1 }'
    assert accepts(spaced, json=PERSON)
    assert not accepts(spaced, json=PERSON, disable_any_whitespace=True)
    assert accepts('{"name":"A","age":1}', json=PERSON, disable_any_whitespace=True)


def test_a_whitespace_pattern_says_what_may_stand_between_the_parts() -> None:
    grammar = compile_grammar(json=PERSON, whitespace_pattern=" ?")
    assert follows(grammar, '{ "name": "A", "age":1}')
    assert not follows(grammar, '{  "name":"A","age":1}')
    assert not follows(grammar, '{\n"name":"A","age":1}')


def test_objects_have_other_properties_unless_they_must_not() -> None:
    nested = {"type": "object", "properties": {"in": {"type": "array", "items": PERSON}}}
    more = '{"in":[{"name":"A","age":1,"x":2}]}'
    assert accepts(more, json=nested)
    assert not accepts(more, json=nested, disable_additional_properties=True)
    assert not accepts('{"x":1}', json=nested, disable_additional_properties=True)


def test_a_schema_that_says_more_about_other_properties_is_not_overruled() -> None:
    schema = {**PERSON, "additionalProperties": {"type": "null"}}
    text = '{"name":"A","age":1,"x":null}'
    assert accepts(text, json=schema, disable_additional_properties=True)
    # Subschemas may be true or false, and stand in lists.
    listed = {"allOf": [PERSON], "items": True}
    assert not accepts(
        '{"name":"A","age":1,"x":1}', json=listed, disable_additional_properties=True
    )
    # A property may be called like a keyword.
    named = {"type": "object", "properties": {"properties": {"type": "object"}}}
    assert accepts('{"properties":{"a":1}}', json=named, disable_additional_properties=True)


def test_the_schema_of_a_caller_is_not_changed() -> None:
    before = json.dumps(PERSON)
    source_of(json=PERSON, disable_any_whitespace=True, disable_additional_properties=True)
    assert json.dumps(PERSON) == before


def test_options_of_the_library_in_a_schema_count() -> None:
    schema = {"enum": [1], "oneOf": [{"minimum": 0}, {"maximum": 5}]}
    with pytest.raises(RequestError, match="oneOf"):
        compile_grammar(json=schema)
    assert accepts("1", json={**schema, "x-guidance": {"lenient": True}})
    with pytest.raises(RequestError, match="x-guidance must be a JSON object, got 3"):
        source_of(json={"x-guidance": 3})


def test_any_json_object_is_any() -> None:
    assert accepts('{"a": [1, {"b": null}]}', json_object=True)
    assert not accepts("[1]", json_object=True)
    assert not accepts('{"a": 1}', json_object=True, disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("regex", "text", "other"),
    [
        (r"\d{3}-\w+", "123-ab_9", "12-ab"),
        (r"^(yes|no)$", "no", "maybe"),
        (r"a/b\/c", "a/b/c", "a/b"),
        ("[^\\W\\d]+", "abc", "a1"),
        ("é|\n", "é", "e"),
    ],
)
def test_a_regex_matches_the_whole_output(regex: str, text: str, other: str) -> None:
    assert accepts(text, regex=regex)
    assert not accepts(other, regex=regex)
    assert not accepts(text + "!", regex=regex)


def test_classes_of_a_regex_are_ascii() -> None:
    assert not accepts("\u0661", regex=r"\d")
    assert not accepts("é", regex=r"\w")


CHOICES = ["yes", "no", 'with "quotes"', "back\\slash", "line\nbreak", "grün 🦀", "// no comment"]


@pytest.mark.parametrize("choice", CHOICES)
def test_the_output_is_one_of_the_choices(choice: str) -> None:
    assert accepts(choice, choice=CHOICES)
    assert not accepts(choice[:-1], choice=CHOICES)
    assert not accepts(choice + "!", choice=CHOICES)


def test_there_may_be_thousands_of_choices() -> None:
    choices = [f"choice {number * 7919}" for number in range(5000)]
    assert accepts(choices[4321], choice=choices)
    assert not accepts("choice 1", choice=choices)


def test_a_grammar_may_be_lark() -> None:
    lark = '?start: sum\nsum: INT ("+" INT)*\n%import common.INT\n%ignore " "  # spaces'
    assert accepts("1 + 23", grammar=lark)
    assert not accepts("1 +", grammar=lark)


TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": [1, 2]}, "end": ";"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    "text", ["", "plain < text", "so: <f=a>{}</f> and <f=b>2; then", "<f=b>1;<f=b>2;"]
)
def test_text_is_free_but_for_tags(text: str) -> None:
    assert accepts(text, structural_tag=json.dumps(TAGS))


@pytest.mark.parametrize("text", ["<f=c>", "<f=b>3;", "<f=a>{}</g>", "see <f=a>{}"])
def test_what_begins_like_a_tag_must_be_one(text: str) -> None:
    assert not accepts(text, structural_tag=json.dumps(TAGS))


def test_a_trigger_that_is_a_special_token_is_that_token() -> None:
    tokens = [*VOCABULARY.tokens[:-1], b"<call>"]
    vocabulary = Vocabulary(tokens=tokens, special_token_ids=[0, len(tokens) - 1])
    tag = {
        "structures": [{"begin": "<call>", "schema": {"enum": [1]}, "end": "."}],
        "triggers": ["<call>"],
    }
    params = StructuredOutputsParams(structural_tag=json.dumps(tag))
    source = grammar_source(params, vocabulary, 10_000)
    assert f"<[{len(tokens) - 1}]>" in source
    assert follows(COMPILER.compile(source), "text <call> is text here")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "it is not JSON"),
        ({"json": "[1]"}, "a schema must be a JSON object, got [1]"),
        ({"json": {"a": object()}}, "the schema is not JSON"),
        ({"json": {"a": "\ud800"}}, "it is no Unicode"),
        ({"json": '"\ud800"'}, "it is no Unicode"),
        ({"choice": ["\ud800"]}, "it is no Unicode"),
        ({"regex": "\ud800"}, "it is no Unicode"),
        ({"grammar": "start: /\ud800/"}, "it is no Unicode"),
        ({"grammar": "root ::= x"}, "line 1: there is no rule x"),
        ({"structural_tag": "x"}, "it is not JSON"),
        ({"structural_tag": "[]"}, "Expected `object`, got `array`"),
        ({"structural_tag": '{"format": {}}'}, "the form with `format` is not supported"),
        (
            {"structural_tag": '{"structures": [], "triggers": ["x"]}'},
            "structures must not be empty",
        ),
        (
            {"structural_tag": json.dumps({**TAGS, "triggers": ["", "<g"]})},
            "begin '<f=a>' starts with none of the triggers ['', '<g']",
        ),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_reason(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        source_of(**fields)


def test_a_schema_that_nests_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="it nests too deeply"):
        source_of(json=schema, disable_additional_properties=True)


def test_a_source_that_is_too_large_is_refused() -> None:
    params = StructuredOutputsParams(regex="a" * 1000)
    with pytest.raises(RequestError, match=r"it has 10\d\d bytes, at most 1000 are served"):
        grammar_source(params, VOCABULARY, 1000)
    assert "aaa" in grammar_source(params, VOCABULARY, 1100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "nothing"}}, "nothing"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"$ref": "http://example.com/x"}}, "example.com"),
        ({"grammar": 'nothing: "x"'}, "start"),
        ({"grammar": 'start: "a"\nother: ("b" # open'}, r"^2\("),
    ],
)
def test_what_the_library_refuses_is_refused_with_its_reason(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        compile_grammar(**fields)
