"""JSON calls: `{"name": ..., "arguments": {...}}`, emitted incrementally while being parsed."""

import json
import re
from collections.abc import Callable, Collection

from kvq.server.tools.format import Spelling, ToolFormat, json_call
from kvq.server.tools.parser import Parser, Steps

_NAME = re.compile(r"[\w.\-:/]{1,256}", re.ASCII)
_STRING = re.compile(r"""[^"'\\]+""")
_PLAIN = re.compile(r'[^"{}\[\]]+')
_SCALAR = re.compile(r"[\w.+\-]+")
_ARGUMENTS = ("arguments", "parameters")


def is_name(name: object) -> bool:
    """Return True if this is a valid function name, whether or not such a function exists."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class _Draft:
    """Call under construction, emitted once its name has been read and its arguments are an object."""

    def __init__(self, parser: Parser, names: Collection[str] | None) -> None:
        self._parser = parser
        self._names = names
        self._arguments: list[str] = []  # arguments read before the name
        self._name: str | None = None
        self.has_begun = False

    def set_name(self, name: str | None) -> bool:
        """Set the name of the function; return False if the name rules out a call."""
        if (
            self._name is not None
            or not is_name(name)
            or (self._names is not None and name not in self._names)
        ):
            return False
        self._name = name
        if self._arguments:
            self._begin()
        return True

    @property
    def has_arguments(self) -> bool:
        """True once any text of the arguments has been read."""
        return self.has_begun or bool(self._arguments)

    def add(self, text: str) -> None:
        if self._name is not None and not self.has_begun:
            self._begin()
        if self.has_begun:
            self._parser.arguments(text)
        else:
            self._arguments.append(text)

    def finish(self) -> bool:
        """Handle the end of the object; return True if the object is a call."""
        if self._name is not None and not self.has_begun and self._names is None:
            self.add("{}")
        return self.has_begun

    def _begin(self) -> None:
        assert self._name is not None, "a call begins with its name"
        self._parser.drop()
        self._parser.start(self._name)
        self.has_begun = True
        self._parser.arguments("".join(self._arguments))


def call_object(parser: Parser, names: Collection[str] | None = None) -> Steps[bool]:
    """Parse an object after its `{` and emit its call; return False, with the text held, if it is not a call.

    If `names` is given, accept only calls of these functions, with arguments. An object that is cut off or
    becomes invalid after the start of the call was emitted is read up to that point.
    """
    draft = _Draft(parser, names)
    while True:
        yield from parser.skip_space()
        if (yield from parser.peek()) == "}":
            parser.take()
            return draft.finish()
        if not (yield from _member(parser, draft, is_open=names is None)):
            return draft.has_begun
        yield from parser.skip_space()
        char = yield from parser.peek()
        if char == ",":
            parser.take()
        elif char != "}":
            return draft.has_begun


def call_array(parser: Parser, names: Collection[str] | None = None) -> Steps[bool]:
    """Parse an array of calls after its `[`; return True if the array contains a call."""
    separator, has_calls = ",", False
    while separator == ",":
        yield from parser.skip_space()
        if not (yield from parser.word("{")) or not (yield from call_object(parser, names)):
            separator = ""
            break
        has_calls = True
        parser.hold()
        yield from parser.skip_space()
        separator = yield from parser.one_of((",", "]"))
    if separator:
        parser.drop()
    elif has_calls:
        yield from parser.no_call()
    return has_calls


def bracket(parser: Parser, sink: Callable[[str], None], plain: re.Pattern[str] = _PLAIN) -> Steps[bool]:
    """Pass a bracketed text, including its outer brackets, to `sink`; return True if the text is complete.

    Only brackets and strings are parsed; any other text is passed through unchanged. `plain` matches text
    that is neither a bracket nor a string.
    """
    depth = 0
    while char := (yield from parser.peek()):
        if text := parser.run(plain):
            sink(text)
        elif char in "\"'":
            if not (yield from _string_text(parser, sink)):
                return False
        else:
            sink(parser.take())
            depth += 1 if char in "([{" else -1
            if depth <= 0:
                return True
    return False


def call_named(parser: Parser, name: str) -> Steps[bool]:
    """Parse the arguments of a call that is preceded by its name; return False if it is not a call."""
    if not is_name(name) or (yield from parser.peek()) != "{":
        return False
    parser.drop()
    parser.start(name)
    yield from bracket(parser, parser.arguments)
    return True


def write_json(value: object) -> str:
    """Return a value as JSON that can be encoded as UTF-8: lone surrogates are escaped.

    Raises:
        ValueError: a number is infinite or NaN.
        TypeError: a value has a type that JSON can't represent.
    """
    return sendable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def sendable(text: str) -> str:
    """Return a JSON text with lone surrogates escaped."""
    return text.encode("utf8", "backslashreplace").decode("utf8")


def _member(parser: Parser, draft: _Draft, *, is_open: bool) -> Steps[bool]:
    """Parse one member of a call; return False if the member is invalid."""
    key = yield from _string(parser)
    if key is None:
        return False
    yield from parser.skip_space()
    if not (yield from parser.word(":")):
        return False
    yield from parser.skip_space()
    if key == "name":
        return draft.set_name((yield from _string(parser)))
    if key in _ARGUMENTS and not draft.has_arguments:
        return (yield from _arguments(parser, draft))
    return (is_open or key in ("id", "type")) and (yield from _any_value(parser))


def _arguments(parser: Parser, draft: _Draft) -> Steps[bool]:
    char = yield from parser.peek()
    if char == "{":
        return (yield from bracket(parser, draft.add))
    if char == '"':  # arguments as a string that contains JSON
        text = yield from _string(parser)
        if text is None or not text.lstrip().startswith("{"):
            return False
        draft.add(sendable(text))
        return True
    if (yield from parser.word("null")):
        draft.add("{}")
        return True
    return False


def _any_value(parser: Parser) -> Steps[bool]:
    char = yield from parser.peek()
    if char and char in "{[":
        return (yield from bracket(parser, _forget))
    if char == '"':
        return (yield from _string_text(parser, _forget))
    return (yield from parser.all_of(_SCALAR)) != ""


def _string(parser: Parser) -> Steps[str | None]:
    """Parse a string; return None if something else follows or the string is cut off."""
    parts: list[str] = []
    if (yield from parser.peek()) != '"' or not (yield from _string_text(parser, parts.append)):
        return None
    try:
        text: str = json.loads("".join(parts), strict=False)
    except ValueError:
        return None
    return text


def _string_text(parser: Parser, sink: Callable[[str], None]) -> Steps[bool]:
    """Pass a string verbatim, with its quotes, to `sink`; return True if the string is complete."""
    quote = parser.take()
    sink(quote)
    while char := (yield from parser.peek()):
        if text := parser.run(_STRING):
            sink(text)
            continue
        sink(parser.take())
        if char == quote:
            return True
        if char == "\\" and (yield from parser.peek()):  # the escaped character
            sink(parser.take())
    return False


def _forget(_: str) -> None:
    pass


# `[{"name": "f", "arguments": {...}}, ...]`, for forced calls if the model's format has no spelling
PLAIN = ToolFormat(
    name="plain",
    read=lambda parser: call_array(parser, parser.tools),
    is_template=lambda _: False,
    opening="[",
    spelling=lambda _: Spelling(call=json_call, before="[", between=", ", after="]"),
)
