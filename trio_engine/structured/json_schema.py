"""JSON schemas as the library takes them, with a request's options in them.

Layer: structured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.errors import RequestError

if TYPE_CHECKING:
    from trio_engine.sampling_params import StructuredOutputsParams

OPTIONS_KEY = "x-guidance"
"""Where the library looks for options, at the top of a schema. What a caller wrote there stays."""

# Where schemas stand inside a schema: below names of the caller's, alone or in a list.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "additionalProperties",
    "items",
    "prefixItems",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)


def decode_json(text: str) -> Any:
    """Reads JSON; RequestError if it is none."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise RequestError(f"it is not JSON: {error}") from None


def schema_rule(schema: Any, params: StructuredOutputsParams) -> str:
    """The right side of a grammar rule for values that a schema allows.

    Raises:
        RequestError: the schema is no JSON object.
    """
    if not isinstance(schema, Mapping):
        raise RequestError(f"a schema must be a JSON object, got {schema!r:.100}")
    if params.disable_additional_properties:
        schema = _closed(schema)
    options = schema.get(OPTIONS_KEY, {})
    if not isinstance(options, Mapping):
        raise RequestError(f"{OPTIONS_KEY} must be a JSON object, got {options!r:.100}")
    given: dict[str, Any] = {}
    if params.disable_any_whitespace:
        given["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        given["whitespace_pattern"] = params.whitespace_pattern
    if given:
        schema = {**schema, OPTIONS_KEY: {**options, **given}}
    try:
        return f"%json {msgspec.json.encode(schema).decode()}"
    except TypeError as error:
        raise RequestError(f"the schema is not JSON: {error}") from None


def _closed(schema: Any) -> Any:
    """A copy in which objects with named properties have no others, unless the schema says so."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    for key in _MAPS:
        if isinstance(copy.get(key), Mapping):
            copy[key] = {name: _closed(value) for name, value in copy[key].items()}
    for key in _SCHEMAS:
        if key in copy:
            copy[key] = _closed(copy[key])
    if isinstance(copy.get("properties"), Mapping) or "patternProperties" in copy:
        copy.setdefault("additionalProperties", False)
    return copy
