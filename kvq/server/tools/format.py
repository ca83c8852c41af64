"""Formats of tool calls: how a call is read, and how forced calls are written."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvq.server.tools.output import Output, call_id
from kvq.server.tools.source import Source, Steps

# Closed objects end. A schema that is composed of others can't be closed from outside.
_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "if", "not")
_STYLE = {"whitespace_flexible": False, "lenient": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of the arguments, an object


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """Parts of a model's tokenizer and template that decide how it spells calls."""

    template: str = ""
    special: Mapping[str, int] = field(default_factory=dict)  # special tokens by their text


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """Text around the arguments, in an answer of calls alone."""

    # From a tool's name: the text before its arguments, and behind them
    call: Callable[[str], tuple[str, str]]
    before: str = ""
    between: str = ""
    after: str = ""
    max_calls: int | None = None  # in a turn that the templates take
    rules: Mapping[str, str] = field(default_factory=dict)  # Lark in place of a text


Schemas = Mapping[str, Mapping[str, Any]]  # of the tools on offer, by name
ReadCall = Callable[[Source, Output, Schemas], Steps[bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """Format in which a family of models writes calls.

    A call stands behind one of the markers `wraps`, behind its `opening`, or behind both; an opening of one
    character counts at the start of a line only. `read` reads a call from there on, or returns False.
    `spelling` says how forced calls are written; without it they are plain JSON.
    """

    name: str
    read: ReadCall
    is_template: Callable[[str], bool]  # True if a chat template uses this format
    wraps: tuple[str, ...] = ()
    opening: str = ""
    ends: tuple[str, ...] = ()  # markers behind calls, left out once there was a call
    inner: tuple[str, ...] = ()  # and those within
    spelling: Callable[[Wording], Spelling] | None = None
    new_id: Callable[[], str] = call_id

    @property
    def markers(self) -> tuple[str, ...]:  # D325: only the format's markers are kept, by token
        """All markers of the format, which are special tokens in many vocabularies."""
        words = (*self.wraps, self.opening, *self.ends, *self.inner)
        return tuple(word for word in words if len(word) > 1)

    def grammar(self, tools: Sequence[Tool], wording: Wording, max_calls: int) -> str:
        """Return the Lark grammar of an answer of 1 to `max_calls` calls and nothing else."""
        assert self.spelling is not None, "others are written as plain JSON"
        spelling, special = self.spelling(wording), wording.special
        rules = {word: f"<[{special[word]}]>" for word in self.markers if word in special}
        rules |= spelling.rules

        def lark(text: str) -> str:
            """Spell a text in Lark; markers are tokens where the vocabulary has them."""
            parts = re.split("(" + "|".join(map(re.escape, rules)) + ")", text) if rules else [text]
            return " ".join(rules.get(part) or json.dumps(part) for part in parts if part)

        more = min(max_calls, spelling.max_calls or max_calls) - 1
        again = f"({lark(spelling.between)} call){{0,{more}}}" if more else ""
        lines = [
            f"start: {lark(spelling.before)} call {again} {lark(spelling.after)}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
        ]
        for i, tool in enumerate(tools):
            begin, end = spelling.call(tool.name)
            lines.append(f"call_{i}: {lark(begin)} arguments_{i} {lark(end)}")
            lines.append(f"arguments_{i}: %json {json.dumps(_closed(tool.parameters))}")
        return "\n".join(lines)


def json_call(name: str, key: str = "arguments") -> tuple[str, str]:
    """Return the text before and behind the arguments of a call that is a JSON object."""
    return f'{{"name": {json.dumps(name)}, "{key}": ', "}"


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:  # D327
    """Return the arguments' schema: an object with no other members than it names."""
    schema = {"type": "object"} | dict(parameters)
    if not any(key in schema for key in _COMPOSED):
        schema = {"properties": {}, "additionalProperties": False} | schema
    return schema | {"x-guidance": _STYLE}
