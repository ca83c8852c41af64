"""Grammar source: turns a request's constraint into a grammar for llguidance and enforces size limits."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llguidance import LLMatcher

from kvq import strict_json
from kvq.engine.grammar.worker import parts, places
from kvq.engine.params import StructuredOutput
from kvq.errors import ConfigError, RequestError, first_lines

OPENING, CLOSING = "([{", ")]}"
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_BRACKET = re.compile(r"[][(){}]")
_ESCAPED = re.compile(r"\\.", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarLimits:
    """Limits for a request's grammar.

    `max_bytes`: size of the schema, regex, Lark text or choices, as UTF-8. `max_depth`: nesting of
    brackets, in a JSON schema or a regex. `compile_timeout_s` and `compile_memory_bytes`: limits for one
    compilation, in processor time and in memory in addition to the tokenizer's. `max_cached`: number of
    accepted grammars to remember. `max_waiting`: number of grammars in compilation or waiting for it. The
    others limit the work and the memory of a mask: `max_lexer_states` of about 2 kB each over a request's
    lifetime, `step_lexer_fuel` of about 14,000 per millisecond, `step_items` of about 20,000 per millisecond,
    and `row_items`, the alternatives that may be open after one token.
    """

    max_bytes: int = 512 << 10
    max_depth: int = 64
    compile_timeout_s: float = 10
    compile_memory_bytes: int = 128 << 20
    max_cached: int = 256
    max_waiting: int = 64
    max_lexer_states: int = 50_000
    step_lexer_fuel: int = 200_000
    step_items: int = 20_000
    row_items: int = 2_000

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(
                    f"GrammarLimits.{field.name} must be above 0, got {getattr(self, field.name)}"
                )

    @property
    def parser(self) -> dict[str, int]:
        """The limits that llguidance enforces, keyed by llguidance's names."""
        return {
            "max_lexer_states": self.max_lexer_states,
            "step_lexer_fuel": self.step_lexer_fuel,
            "step_max_items": self.step_items,
            "max_items_in_row": self.row_items,
        }


def grammar_text(spec: StructuredOutput, limits: GrammarLimits) -> str:
    """Return llguidance's grammar for `spec`.

    JSON generated for a schema has no white space outside strings, so generation can't run on forever. Parts
    of a schema that llguidance can't enforce are refused, never ignored.

    Raises:
        RequestError: the text is too long, nested too deeply, not JSON, or not Unicode.
    """
    text = _constraint_text(spec, limits)
    if not spec.before:
        return text
    first, *others = parts(text) or [{"lark_grammar": text}]
    name = first.get("name") or "constraint"
    start = {"lark_grammar": f"start: before @{name}\n{spec.before}"}
    return json.dumps({"grammars": [start, first | {"name": name}, *others]})


def _constraint_text(spec: StructuredOutput, limits: GrammarLimits) -> str:
    if spec.json_schema is not None:
        return _schema_text(spec.json_schema, limits)
    if spec.choice is not None:
        _check_size("choice", "".join(spec.choice), limits)
        return LLMatcher.grammar_from_regex("|".join("".join(map(_literal, one)) for one in spec.choice))
    if spec.regex is not None:
        _check_text("regex", spec.regex, limits)
        return LLMatcher.grammar_from_regex(spec.regex)
    assert spec.lark is not None, "StructuredOutput holds exactly one of four"
    _check_text("lark", spec.lark, limits)
    return LLMatcher.grammar_from_lark(spec.lark)


def _schema_text(schema: Mapping[str, Any] | str, limits: GrammarLimits) -> str:
    if isinstance(schema, str):
        _check_text("json_schema", schema, limits)
    else:
        _check_tree(schema, limits)
    try:
        tree = strict_json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(tree, ensure_ascii=False, allow_nan=False, default=_plain)
        if '"format"' in text and isinstance(tree, Mapping):
            text = json.dumps(_without_annotations(json.loads(text)), ensure_ascii=False)
    except (ValueError, TypeError) as error:
        raise RequestError(f"json_schema isn't JSON: {first_lines(error)}") from error
    if not isinstance(tree, Mapping):
        raise RequestError(f"json_schema must be a JSON object, got {text[:80]}")
    _check_size("json_schema", text, limits)
    try:
        # `overrides` take precedence over an x-guidance key of the schema, which could disable checks
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_flexible": False, "lenient": False}
        )
    except ValueError as error:
        raise RequestError(f"json_schema isn't one: {first_lines(error)}") from error


def _without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without formats that aren't enforced; JSON Schema 2020-12 makes them annotations."""
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        del schema["format"]
    for _, inner in places(schema):
        _without_annotations(inner)
    return schema


def _literal(character: str) -> str:
    is_plain = character.isascii() and character.isalnum()
    return character if is_plain else f"\\x{{{ord(character):X}}}"


def _check_text(name: str, text: str, limits: GrammarLimits) -> None:
    _check_size(name, text, limits)
    if _depth(text) > limits.max_depth:
        raise RequestError(f"{name} may be nested {limits.max_depth} levels deep at most")


def _check_size(name: str, text: str, limits: GrammarLimits) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} isn't valid Unicode: {first_lines(error)}") from error
    if size > limits.max_bytes:
        raise RequestError(f"{name} may take {limits.max_bytes} bytes at most, got {size}")


def _depth(text: str) -> int:
    """Return the nesting depth of brackets. Brackets in strings count; escaped ones don't.

    This is only a first check: deeper nesting reaches llguidance's own limits or overflows the child's stack.
    """
    depth = deepest = 0
    for bracket in _BRACKET.findall(_ESCAPED.sub("", text)):
        if bracket in OPENING:
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth = max(0, depth - 1)
    return deepest


def _check_tree(schema: Mapping[str, Any], limits: GrammarLimits) -> None:
    """Raise RequestError for a tree that is too deep (or contains itself) or too large for JSON."""
    nodes = 0
    open_nodes: list[tuple[Any, int]] = [(schema, 1)]
    while open_nodes:
        node, depth = open_nodes.pop()
        nodes += 1
        if nodes > limits.max_bytes:
            raise RequestError(f"json_schema may take {limits.max_bytes} bytes at most")
        if not isinstance(node, Mapping | list | tuple):
            continue
        if depth > limits.max_depth:
            raise RequestError(f"json_schema may be nested {limits.max_depth} levels deep at most")
        children = node.values() if isinstance(node, Mapping) else node
        open_nodes.extend((child, depth + 1) for child in children)


def _plain(value: object) -> dict[Any, Any]:
    """Convert any Mapping to a dict for `json`."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} can't be written as JSON")
