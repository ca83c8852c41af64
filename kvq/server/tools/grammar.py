"""Lark grammars of answers that are calls and nothing else."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvq.server.tools.format import Tool, Wording

MAX_FORCED_CALLS = 16  # of one answer; a model that is never sure would go on for ever
# Closed objects end. A schema that is composed of others can't be closed from outside.
_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "if", "not")
_STYLE = {"whitespace_flexible": False, "lenient": False, "item_separator": ", ", "key_separator": ": "}


def calls(
    tools: Sequence[Tool],
    call: Callable[[Tool, str], str],
    max_calls: int,
    *,
    before: str = "",
    between: str = "",
    after: str = "",
) -> str:
    """A grammar of 1 to `max_calls` calls.

    `call` writes one as Lark, from a tool and the rule of its arguments; so are the other three Lark.
    """
    more = f"({between} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    lines = [
        f"start: {before} call {more} {after}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        lines.append(f"call_{i}: {call(tool, f'arguments_{i}')}")
        lines.append(f"arguments_{i}: %json {json.dumps(_schema(tool.parameters))}")
    return "\n".join(lines)


def literal(text: str, wording: Wording, markers: Sequence[str] = ()) -> str:
    """A text as Lark; markers in it are the tokens that they are in this vocabulary."""
    if not markers:
        return json.dumps(text)
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text)
    return " ".join(_part(part, wording) for part in parts if part)


def named(tool: Tool) -> str:
    """A tool's name as JSON."""
    return json.dumps(tool.name)


def _part(part: str, wording: Wording) -> str:
    token = wording.special.get(part)
    return json.dumps(part) if token is None else f"<[{token}]>"


def _schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments' schema: of an object, and without other members than it names."""
    schema = {"type": "object"} | dict(parameters)
    if not any(key in schema for key in _COMPOSED):
        schema = {"properties": {}, "additionalProperties": False} | schema
    return schema | {"x-guidance": _STYLE}
