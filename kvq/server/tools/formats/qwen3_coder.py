"""Calls in tags: `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`.

Values are text; the tool's schema determines their types. Each value is emitted when it is complete.
Source: the chat template of Qwen 3 Coder, which puts tags and values on separate lines.
"""

import json
import re
from ast import literal_eval
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from kvq.server.tools.format import ToolFormat
from kvq.server.tools.json_calls import is_name, write_json
from kvq.server.tools.parser import Parser, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^>\s]+")
_NO_TAG = re.compile(r"[^<]+")
_MOST_PARTS = 128  # parts of schemas examined for a value; some schemas refer to themselves
_OPEN = object()  # placeholder of no type, allowed only by schemas without a type
_PYTHON = {"True": True, "TRUE": True, "False": False, "FALSE": False, "None": None}
_KINDS: dict[str, Any] = {
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: _KINDS["number"](value) and value == value // 1,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}


def _read(parser: Parser) -> Steps[bool]:
    name = yield from parser.all_of(_NAME)
    if not is_name(name) or not (yield from parser.word(">")):
        return False
    parser.drop()
    parser.start(name)
    yield from _parameters(parser, parser.tools.get(name, {}))
    return True


def _parameters(parser: Parser, schema: Mapping[str, Any]) -> Steps[None]:
    """Emit a call's arguments as a JSON object, leaving the object unclosed if the call is cut off."""
    before = "{"
    while (name := (yield from _parameter(parser))) is not None:
        text = yield from _value(parser)
        if text is None:
            return
        parser.arguments(f"{before}{write_json(name)}: {_as_json(text, name, schema)}")
        before = ", "
    held = parser.release()
    if held.strip() in (_END_FUNCTION, _END):
        parser.arguments("{}" if before == "{" else "}")
    elif (yield from parser.peek()):
        parser.arguments("{}" if before == "{" else "}")
        parser.show(held)


def _parameter(parser: Parser) -> Steps[str | None]:
    """Parse a parameter's name; if something else follows, hold that text and return None."""
    parser.hold()
    yield from parser.skip_space()
    if (yield from parser.one_of((_PARAMETER, _END_FUNCTION, _END))) != _PARAMETER:
        return None
    name = yield from parser.all_of(_NAME)
    if not name or not (yield from parser.word(">")):
        return None
    parser.drop()
    return name


def _value(parser: Parser) -> Steps[str | None]:
    """Return a parameter's text without enclosing line breaks, or None if the text is cut off."""
    parts: list[str] = []
    while (yield from parser.peek()):
        if text := parser.run(_NO_TAG):
            parts.append(text)
            continue
        parser.hold()
        is_end = yield from parser.word(_END_PARAMETER)
        text = parser.release()
        if is_end:
            return "".join(parts).removeprefix("\n").removesuffix("\n")
        parts.append(text)
    return None


def _as_json(text: str, name: str, schema: Mapping[str, Any]) -> str:
    try:
        return write_json(value_of(text, name, schema))
    except ValueError:  # a number that JSON can't represent
        return write_json(text)


class _Schemas:
    """JSON schema that resolves its local references."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MOST_PARTS

    def allow(self, schema: object, value: object) -> bool:
        """Return True if a value matches a schema's types and enumerations; its members are not checked."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return schema is not False
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        is_of_kind = not kinds or any(_KINDS.get(str(kind), lambda _: True)(value) for kind in kinds)
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        return (
            (is_of_kind or (value is None and schema.get("nullable") is True))
            and (not isinstance(listed, list) or any(_is_same(value, one) for one in listed))
            and all(self.allow(part, value) for part in self._composed(schema, "$ref", "allOf"))
            and all(
                any(self.allow(part, value) for part in self._composed(schema, key))
                for key in ("anyOf", "oneOf")
                if schema.get(key)
            )
        )

    def member(self, schema: object, name: str) -> object:
        """Return the schema of an object's member, combined from all parts that define `name`, or None."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return None
        properties = schema.get("properties")
        own = properties.get(name) if isinstance(properties, Mapping) else None
        every, some = (
            [one for part in self._composed(schema, *keys) if (one := self.member(part, name)) is not None]
            for keys in (("$ref", "allOf"), ("anyOf", "oneOf"))
        )
        found = [*([] if own is None else [own]), *every, *([{"anyOf": some}] if some else [])]
        return {"allOf": found} if found else schema.get("additionalProperties")

    def _composed(self, schema: Mapping[str, Any], *keys: str) -> Iterator[object]:
        for key in keys:
            if key == "$ref" and key in schema:
                yield self._target(str(schema[key]))
            elif isinstance(parts := schema.get(key), list):
                yield from parts

    def _target(self, reference: str) -> object:
        """Return the target of a local reference, or a permissive schema if there is no target."""
        found: Any = self._root
        for name in unquote(reference.removeprefix("#")).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name) if isinstance(found, list) else name]
            except (KeyError, IndexError, TypeError, ValueError):
                return {}
        return found if reference.startswith("#") else {}


def value_of(text: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """Return a parameter's JSON value, or its text if the schema allows text but not the JSON value."""
    schemas = _Schemas(parameters)
    schema = schemas.member(parameters, name)
    is_open, is_text = schemas.allow(schema, _OPEN), schemas.allow(schema, text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _from_python(text.strip(), text) if is_open or not is_text else text
    if is_text and not is_open and (isinstance(value, str) or not schemas.allow(schema, value)):
        return text
    return value


def _from_python(written: str, text: str) -> Any:
    """Return the value of a Python literal, or `text` if `written` is not a literal."""
    if written[:1] in ("{", "["):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = literal_eval(written)
            json.dumps(value, allow_nan=False)  # no sets, bytes or complex numbers
            return value
    return _PYTHON.get(written, text)


def _is_same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    read=_read,
    is_template=lambda template: _FUNCTION in template and _PARAMETER in template,
    wraps=(_BEGIN,),
    opening=_FUNCTION,
    ends=(_END_FUNCTION, _END),
    inner=(_PARAMETER, _END_PARAMETER),
)
