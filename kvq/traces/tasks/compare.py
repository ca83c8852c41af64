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
    schema = tool["function"].get("parameters") or {}
    try:
        wanted, found = (strict_json.loads(call["arguments"]) for call in (expected, got))
    except ValueError:
        return False
    return bool(expected["name"] == got["name"] and _normal(wanted, schema) == _normal(found, schema))


def fits(schema: Any, value: Any) -> bool:
    """Return whether a JSON value fits a schema. Other keywords than these, and faulty ones, are ignored."""
    if not isinstance(schema, dict):
        return schema is not False
    if not _has_type(value, schema.get("type")):
        return False
    enum = schema.get("enum")
    if isinstance(enum, list) and _normal(value, {}) not in [_normal(one, {}) for one in enum]:
        return False
    if isinstance(value, list):
        return all(fits(schema.get("items"), one) for one in value)
    if not isinstance(value, dict):
        return True
    known, required = _properties(schema), schema.get("required")
    if isinstance(required, list) and any(name not in value for name in required):
        return False
    others = schema.get("additionalProperties", True)
    return all(fits(known.get(name, others), one) for name, one in value.items())


def _properties(schema: Any) -> Mapping[str, Any]:
    """Return the schemas of an object's members that are objects; none if a schema is no such schema."""
    known = schema.get("properties") if isinstance(schema, dict) else None
    return (
        {name: one for name, one in known.items() if isinstance(one, dict)} if isinstance(known, dict) else {}
    )


def _has_type(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_has_type(value, one) for one in wanted)
    if isinstance(value, bool):  # an int to Python
        return wanted in ("boolean", None) or wanted not in (*_TYPES, "integer")
    if wanted == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return not isinstance(wanted, str) or isinstance(value, _TYPES.get(wanted, object))


def _normal(value: Any, schema: Any) -> Any:
    """Return a value that is equal for equal meanings; booleans differ from numbers."""
    if isinstance(value, dict):
        known = _properties(schema)
        defaults = {name: one["default"] for name, one in known.items() if "default" in one}
        return {name: _normal(one, known.get(name)) for name, one in (defaults | value).items()}
    if isinstance(value, list):
        return [_normal(one, schema.get("items") if isinstance(schema, dict) else None) for one in value]
    return value.strip() if isinstance(value, str) else (isinstance(value, bool), value)
