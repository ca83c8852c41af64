"""Random JSON schemas whose every instance is short: each string, list and number has bounds."""

import random
from typing import Any

MAX_DEPTH = 3
WORDS = ["id", "name", "größe", "a b", 'q"uote', "back\\slash", "x", "tags", "emoji 😀", "", "kind", "ü/ß"]
PATTERNS = ["^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3,5}$", "^(red|green|blue)?$", "^#[0-9a-f]{6}$"]
FORMATS = ["date", "uuid", "ipv4"]


def random_schema(rng: random.Random, depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return an object's schema, nested `depth` levels at most."""
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _pattern, _integer, _number, _fixed, _plain]
    if depth > 0:
        kinds += [_array, _any_of, random_schema]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-2000, 2000)
    key = rng.choice(["maximum", "exclusiveMaximum"])
    return {"type": "integer", "minimum": low, key: low + rng.randint(1, 10 ** rng.randint(1, 9))}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    """A range alone leaves the digits after the point unbounded, `multipleOf` bounds them."""
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 99), "multipleOf": 0.25}


def _fixed(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [rng.choice([*WORDS, 0, -7, True, False, None, 12345]) for _ in range(rng.randint(1, 4))]
    return {"const": values[0]} if rng.random() < 0.3 else {"enum": values}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    items = _value(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 3)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
