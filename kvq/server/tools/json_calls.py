"""JSON calls: `{"name": ..., "arguments": {...}}`, emitted while they are read."""

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
    """True if this can be a function's name, whether or not there is such a function."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class _Draft:
    """Call that begins once its name is known and its arguments are an object."""

    def __init__(self, parser: Parser, names: Collection[str] | None) -> None:
        self._parser = parser
        self._names = names
        self._arguments: list[str] = []  # arguments read before the name
        self._name: str | None = None
        self.has_begun = False

    def set_name(self, name: str | None) -> bool:
        """Set the name of the function; return False if this can't be a call."""
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
        """True once any arguments were read."""
        return self.has_begun or bool(self._arguments)

    def add(self, text: str) -> None:
        if self._name is not None and not self.has_begun:
            self._begin()
        if self.has_begun:
            self._parser.arguments(text)
        else:
            self._arguments.append(text)

    def finish(self) -> bool:
        """End the object; return True if it was a call."""
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
    """Read an object after its `{` and emit its call; return False, its text still held, if it is no call.

    With `names`, only these functions count, and an object without arguments is not a call. An object that
    breaks off or becomes invalid after the call has begun is read up to that point.
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
    """Read an array of calls after its `[`; return True if there was a call."""
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
    """Pass a text in brackets, including its outer brackets, to `sink`; return True if it is complete.

    Only brackets and strings are examined: anything that a model writes between them is passed on. `plain`
    matches text that is neither.
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
    """Read the arguments of a call whose name came first; return False if it is not a call."""
    if not is_name(name) or (yield from parser.peek()) != "{":
        return False
    parser.drop()
    parser.start(name)
    yield from bracket(parser, parser.arguments)
    return True


def write_json(value: object) -> str:
    """Encode a value as JSON that can be sent: lone surrogates are escaped.

    Raises:
        ValueError: a number is infinite or NaN.
        TypeError: a value has a type that JSON does not have.
    """
    return sendable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def sendable(text: str) -> str:
    """Escape lone surrogates in a JSON text."""
    return text.encode("utf8", "backslashreplace").decode("utf8")


def _member(parser: Parser, draft: _Draft, *, is_open: bool) -> Steps[bool]:
    """Read one member of a call; return False if it is invalid."""
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
    if char == '"':  # JSON within JSON
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
    """Read a string; return None if something else follows, or if the string breaks off."""
    parts: list[str] = []
    if (yield from parser.peek()) != '"' or not (yield from _string_text(parser, parts.append)):
        return None
    try:
        text: str = json.loads("".join(parts), strict=False)
    except ValueError:
        return None
    return text


def _string_text(parser: Parser, sink: Callable[[str], None]) -> Steps[bool]:
    """Pass a string, as written and with its quotes, to `sink`; return True if it is complete."""
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
