"""Comparison of calls: whether two are the same, and whether one fits the schema of its tool."""

from collections.abc import Mapping
from typing import Any

from kvq import strict_json

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def same_call(tool: Mapping[str, Any], expected: Mapping[str, Any], got: Mapping[str, Any]) -> bool:
    """Return whether two calls mean the same to `tool`, the expected call's tool in OpenAI's form.

    `expected`, `got`: a name and arguments, which are a JSON text. Numbers are compared by value, texts
    without the white space around them, and an absent argument counts as its default in the schema.
    """
    schema = tool["function"]["parameters"]
    try:
        wanted, found = (strict_json.loads(call["arguments"]) for call in (expected, got))
    except ValueError:
        return False
    return bool(expected["name"] == got["name"] and _normal(wanted, schema) == _normal(found, schema))


def fits(schema: Mapping[str, Any] | bool, value: Any) -> bool:
    """Return whether a JSON value fits a schema. Keywords that tools' schemas here do not use are ignored."""
    if isinstance(schema, bool):
        return schema
    if not _has_type(value, schema.get("type")):
        return False
    if "enum" in schema and _normal(value, {}) not in [_normal(one, {}) for one in schema["enum"]]:
        return False
    if isinstance(value, list):
        return all(fits(schema.get("items", {}), one) for one in value)
    if not isinstance(value, dict):
        return True
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    has_required = value.keys() >= set(schema.get("required", ()))
    return has_required and all(fits(known.get(name, others), one) for name, one in value.items())


def _has_type(value: Any, wanted: str | list[str] | None) -> bool:
    if wanted is None or isinstance(wanted, list):
        return wanted is None or any(_has_type(value, one) for one in wanted)
    if isinstance(value, bool):  # an int to Python
        return wanted == "boolean"
    if wanted == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _TYPES[wanted])


def _normal(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value that is equal for equal meanings; booleans differ from numbers."""
    if isinstance(value, dict):
        known = schema.get("properties", {})
        defaults = {name: one["default"] for name, one in known.items() if "default" in one}
        return {name: _normal(one, known.get(name, {})) for name, one in (defaults | value).items()}
    if isinstance(value, list):
        return [_normal(one, schema.get("items", {})) for one in value]
    return value.strip() if isinstance(value, str) else (isinstance(value, bool), value)
