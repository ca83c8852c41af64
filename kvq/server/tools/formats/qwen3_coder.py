"""Calls in tags: `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`.

A value is text; the tool's schema says what it means. Each is given out when it is complete.
Source: the chat template of Qwen 3 Coder, which puts tags and values on lines of their own.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvq.server.tools.format import ToolFormat
from kvq.server.tools.formats.values import value_of
from kvq.server.tools.json_calls import is_name, write_json
from kvq.server.tools.parser import Parser, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^>\s]+")
_NO_TAG = re.compile(r"[^<]+")


def _read(parser: Parser) -> Steps[bool]:
    name = yield from parser.all_of(_NAME)
    if not is_name(name) or not (yield from parser.word(">")):
        return False
    parser.drop()
    parser.start(name)
    yield from _parameters(parser, parser.tools.get(name, {}))
    return True


def _parameters(parser: Parser, schema: Mapping[str, Any]) -> Steps[None]:
    """Give out a call's arguments; those of one that breaks off stay open."""
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
    """Read a parameter's name; None if something else comes, which is held."""
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
    """Read a parameter's text without the line breaks around it; None if it breaks off."""
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
    except ValueError:  # a number that JSON does not have
        return write_json(text)


QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    read=_read,
    is_template=lambda template: _FUNCTION in template and _PARAMETER in template,
    wraps=(_BEGIN,),
    opening=_FUNCTION,
    ends=(_END_FUNCTION, _END),
    inner=(_PARAMETER, _END_PARAMETER),
)
