"""Kinds of tokens in an answer: names of tools, keys and values of arguments, structure, numbers, code, text.

Marks are found by search, so they don't depend on how a model spells calls: behind the answer's text, all is
structure but the names, keys and values of the recorded calls, in their order.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from kvq.server.tools.format import arguments_of


class TokenKind(StrEnum):
    """Kind of a token, by what it decides."""

    NAME = "name"  # of a tool
    KEY = "key"  # of an argument
    VALUE = "value"  # of an argument
    STRUCTURE = "structure"  # of calls and JSON, and the end of an answer
    NUMBER = "number"  # outside of calls
    CODE = "code"
    TEXT = "text"


DECISIVE = frozenset(TokenKind) - {TokenKind.TEXT}
CALLED = frozenset((TokenKind.NAME, TokenKind.KEY, TokenKind.VALUE))  # what a grammar leaves open
_FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_JSON = re.compile(r'(?P<value>"(?:[^"\\]|\\.)*"|[\w.+\-]+)(?P<key>\s*:)?', re.DOTALL)


def kinds_of(pieces: Sequence[str], message: Mapping[str, Any]) -> list[TokenKind]:
    """Return the kind of each token of an answer: that of most of its characters, the rarest of equals.

    `pieces`: the texts of the tokens; `message`: the assistant's message, in OpenAI's form.
    """
    text = "".join(pieces)
    marks = _marks(text, message)
    found, at = [], 0
    for piece in pieces:
        own = marks[at : at + len(piece)] or [TokenKind.STRUCTURE]
        found.append(max(dict.fromkeys(own), key=lambda kind: (own.count(kind), -_ORDER.index(kind))))
        at += len(piece)
    return found


_ORDER = list(TokenKind)


def _marks(text: str, message: Mapping[str, Any]) -> list[TokenKind]:
    """Return the kind of each character."""
    marks = [TokenKind.STRUCTURE] * len(text)
    said = str(message.get("content") or "").strip()
    start = text.find(said) if said else -1
    at = 0
    if start >= 0:
        at = start + len(said)
        for first, end, kind in _text_marks(said):
            marks[start + first : start + end] = [kind] * (end - first)
    for call in message.get("tool_calls") or ():
        for word, kind in _call_words(call["function"]):
            place = text.find(word, at) if word else -1
            if place >= 0:
                at = place + len(word)
                marks[place:at] = [kind] * len(word)
    return marks


def _text_marks(text: str) -> Iterator[tuple[int, int, TokenKind]]:
    """Yield (first, end, kind) of a text's parts; later ones lie over earlier ones."""
    if is_json(text):
        yield 0, len(text), TokenKind.STRUCTURE
        for one in _JSON.finditer(text):
            yield *one.span("value"), TokenKind.KEY if one["key"] else TokenKind.VALUE
        return
    yield 0, len(text), TokenKind.TEXT
    for one in _NUMBER.finditer(text):
        yield *one.span(), TokenKind.NUMBER
    for one in _FENCED.finditer(text):
        yield *one.span(), TokenKind.CODE


def _call_words(function: Mapping[str, Any]) -> Iterator[tuple[str, TokenKind]]:
    yield function["name"], TokenKind.NAME
    for key, value in arguments_of(function["arguments"]).items():
        yield key, TokenKind.KEY
        yield from _value_words(value)


def _value_words(value: Any) -> Iterator[tuple[str, TokenKind]]:
    """Yield the words of a value as calls spell them: strings without their quotation marks, escaped."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key, TokenKind.KEY
            yield from _value_words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _value_words(inner)
    else:
        word = json.dumps(value, ensure_ascii=False)
        yield word[1:-1] if isinstance(value, str) else word, TokenKind.VALUE


def is_json(text: str) -> bool:
    """Return True if a text is a JSON object or array."""
    return text[:1] in ("{", "[") and parses(text)


def parses(text: str) -> bool:
    """Return True if a text is a JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
