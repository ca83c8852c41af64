"""Formats of tool calls: how calls are parsed, and how forced calls are spelled."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from kvq.server.tools.parser import Parser, Steps

# Objects are closed, which makes them end. A schema composed of others can't be closed from outside.
_COMPOSED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "if", "not")
_STYLE = {"whitespace_flexible": False, "lenient": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """Function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of the arguments, an object


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """Spelling of calls: the text around the arguments in an output that consists only of calls."""

    # Maps a tool's name to the texts before and after its arguments
    call: Callable[[str], tuple[str, str]]
    before: str = ""
    between: str = ""
    after: str = ""
    max_calls: int | None = None  # maximum per turn that the templates accept
    rules: Mapping[str, str] = field(default_factory=dict)  # Lark rules in place of texts


def call_id() -> str:
    """Return a new call id in the form of OpenAI's API."""
    return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """Format in which a family of models writes calls.

    A call starts with one of the markers `wraps`, its `opening`, or both; an opening of one character counts
    only at the start of a line. `read` parses the rest of the call, or returns False. `spelling` returns the
    spelling for a model's chat template; if `spelling` is None, forced calls are written as plain JSON.
    """

    name: str
    read: Callable[[Parser], Steps[bool]]
    is_template: Callable[[str], bool]  # True if a chat template uses this format
    wraps: tuple[str, ...] = ()
    opening: str = ""
    ends: tuple[str, ...] = ()  # markers after calls, omitted from the text once a call was read
    inner: tuple[str, ...] = ()  # markers inside calls
    spelling: Callable[[str], Spelling] | None = None
    new_id: Callable[[], str] = call_id

    @property
    def markers(self) -> tuple[str, ...]:  # D325: only the format's markers are kept, as tokens
        """All markers of the format; in many vocabularies, these are special tokens."""
        words = (*self.wraps, self.opening, *self.ends, *self.inner)
        return tuple(word for word in words if len(word) > 1)

    def parser(self, tools: Sequence[Tool] = (), *, max_calls: int | None = None) -> Parser:
        """Return a parser for one result. A format without markers accepts only calls of `tools`."""
        schemas = {tool.name: tool.parameters for tool in tools}
        return Parser(self._read_answer, schemas, self.new_id, max_calls)

    def _read_answer(self, parser: Parser) -> Steps[None]:
        starts = [word for word in (*self.wraps, self.opening) if word]
        while marker := (yield from self._until_marker(parser, starts)):
            is_open = marker == self.opening
            if not is_open:  # the marker wraps a call
                yield from parser.skip_space()
                is_open = not self.opening or (yield from parser.word(self.opening))
            if not is_open or not (yield from self.read(parser)):
                yield from parser.no_call()

    def _until_marker(self, parser: Parser, starts: Sequence[str]) -> Steps[str]:
        """Show text up to the next marker in `starts`, and return the marker, or "" at the end of the text.

        Text from the marker on is held until it is clear whether a call follows.
        """
        words = (*starts, *self.ends)
        plain = re.compile(f"[^{re.escape(''.join({word[0] for word in words}))}]+")
        while char := (yield from parser.peek()):
            if text := parser.run(plain):
                parser.show(text)
                continue
            if char in starts and not parser.is_line_start:
                parser.show(parser.take())
                continue
            parser.hold()
            word = yield from parser.one_of(words)
            if word and word not in self.ends:
                return word
            if word and parser.num_calls:
                parser.drop()
            else:
                yield from parser.no_call()
        return ""

    def grammar(
        self, tools: Sequence[Tool], max_calls: int, *, template: str = "", special: Mapping[str, int]
    ) -> str:
        """Return the Lark grammar of an output that consists of 1 to `max_calls` calls.

        `template`: the model's chat template; `special`: ids of its special tokens, keyed by text.
        """
        assert self.spelling is not None, "others are written as plain JSON"
        spelling = self.spelling(template)
        rules = {word: f"<[{special[word]}]>" for word in self.markers if word in special}
        rules |= spelling.rules

        def lark(text: str) -> str:
            """Return a text as a Lark expression; markers become tokens if the vocabulary has them."""
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
    """Return the texts before and after the arguments in a call written as a JSON object."""
    return f'{{"name": {json.dumps(name)}, "{key}": ', "}"


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's decoded arguments, or {} if they are incomplete or not an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:  # D327
    """Return the schema of the arguments, restricted to the members that it names."""
    schema = {"type": "object"} | dict(parameters)
    if not any(key in schema for key in _COMPOSED):
        schema = {"properties": {}, "additionalProperties": False} | schema
    return schema | {"x-guidance": _STYLE}
