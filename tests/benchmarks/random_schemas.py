"""Random JSON schemas whose outputs are bounded, so that whoever follows one comes to its end."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any, TypeAlias

Kind: TypeAlias = Callable[[random.Random, int], dict[str, Any]]

MAX_DEPTH = 3
MAX_PROPERTIES = 4
MAX_ITEMS = 3
MAX_LENGTH = 12

NAMES = ("name", "age", "city", "tags", "kind", "score", "items", "active", "note", "owner")
WORDS = ("red", "green", "blue", "small", "large", "north", "south", "yes", "no", "42%")


def draw_schema(rng: random.Random) -> dict[str, Any]:
    """An object or an array at the top, and at most ``MAX_DEPTH`` levels."""
    return rng.choice([_object, _object, _object, _array])(rng, 1)


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[Kind] = [_string, _integer, _enum, _simple]
    if depth < MAX_DEPTH:
        kinds += [_object, _array, _any_of]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, MAX_PROPERTIES))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "array",
        "items": _value(rng, depth + 1),
        "maxItems": rng.randint(1, MAX_ITEMS),
    }
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, schema["maxItems"])
    return schema


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        letters = "".join(sorted(rng.sample(string.ascii_lowercase, 3)))
        return {"type": "string", "pattern": f"^[{letters}]{{1,{rng.randint(1, 6)}}}$"}
    schema: dict[str, Any] = {"type": "string", "maxLength": rng.randint(1, MAX_LENGTH)}
    if rng.random() < 0.3:
        schema["minLength"] = rng.randint(0, schema["maxLength"])
    return schema


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _enum(rng: random.Random, _depth: int) -> dict[str, Any]:
    values = [*rng.sample(WORDS, rng.randint(1, 4)), *rng.sample([0, 1.5, None, True], 1)]
    return {"enum": values}


def _simple(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth + 1) for _ in range(2)]}
