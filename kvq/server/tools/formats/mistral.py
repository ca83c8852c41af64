"""`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, newer: `[TOOL_CALLS]f[ARGS]{...}` per call.

In the newer form, `[ARGS]` may be missing, or be preceded by `[CALL_ID]` and an id.
Source: the chat templates of Mistral Nemo, Mistral Small 3.1 and 3.2, Ministral 3 and Devstral.
"""

import re
import secrets
import string

from kvq.server.tools.format import Spelling, ToolFormat, json_call
from kvq.server.tools.json_calls import call_array, call_named, is_name
from kvq.server.tools.parser import Parser, Steps

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = re.compile(r"[^\s\[{]+")
_ANY_ID = "\0id"


def _read(parser: Parser) -> Steps[bool]:
    if (yield from parser.peek()) == "[":
        parser.take()
        return (yield from call_array(parser))
    name = yield from parser.all_of(_WORD)
    if not is_name(name):
        return False
    while (yield from parser.peek()) == "[":
        marker = yield from parser.one_of((_ID, _ARGUMENTS))
        if not marker:
            return False
        if marker == _ID:
            yield from parser.all_of(_WORD)
    yield from parser.skip_space()
    return (yield from call_named(parser, name))


def _spelling(template: str) -> Spelling:
    if _ARGUMENTS in template:
        call_id = _ID + _ANY_ID if _ID in template else ""
        return Spelling(
            call=lambda name: (f"{_BEGIN}{name}{call_id}{_ARGUMENTS}", ""),
            rules={_ANY_ID: "/[a-zA-Z0-9]{9}/"},
        )
    begin = f"{_BEGIN} [" if f"{_BEGIN} [" in template else f"{_BEGIN}["
    return Spelling(call=json_call, before=begin, between=", ", after="]")


def _new_id() -> str:
    """Return an id of nine letters and digits: Mistral's templates reject other ids in later requests."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


MISTRAL = ToolFormat(
    name="mistral",
    read=_read,
    is_template=lambda template: _BEGIN in template,
    wraps=(_BEGIN,),
    inner=(_ID, _ARGUMENTS),
    spelling=_spelling,
    new_id=_new_id,
)
