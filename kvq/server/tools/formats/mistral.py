"""`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, newer: `[TOOL_CALLS]f[ARGS]{...}` for each call.

The latter has been seen without `[ARGS]`, and with `[CALL_ID]` and an id before it.
Source: the chat templates of Mistral Nemo, Mistral Small 3.1 and 3.2, Ministral 3 and Devstral.
"""

import re
import secrets
import string

from kvq.server.tools.format import Schemas, Spelling, ToolFormat, Wording, json_call
from kvq.server.tools.json_calls import call_array, call_named, is_name
from kvq.server.tools.output import Output
from kvq.server.tools.source import Source, Steps

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = re.compile(r"[^\s\[{]+")
_ANY_ID = "\0id"


def _read(source: Source, output: Output, _: Schemas) -> Steps[bool]:
    if (yield from source.peek()) == "[":
        source.take()
        return (yield from call_array(source, output))
    name = yield from source.all_of(_WORD)
    if not is_name(name):
        return False
    while (yield from source.peek()) == "[":
        marker = yield from source.one_of((_ID, _ARGUMENTS))
        if not marker:
            return False
        if marker == _ID:
            yield from source.all_of(_WORD)
    yield from source.skip_space()
    return (yield from call_named(source, output, name))


def _spelling(wording: Wording) -> Spelling:
    if _ARGUMENTS in wording.template:
        call_id = _ID + _ANY_ID if _ID in wording.template else ""
        return Spelling(
            call=lambda name: (f"{_BEGIN}{name}{call_id}{_ARGUMENTS}", ""),
            rules={_ANY_ID: "/[a-zA-Z0-9]{9}/"},
        )
    begin = f"{_BEGIN} [" if f"{_BEGIN} [" in wording.template else f"{_BEGIN}["
    return Spelling(call=json_call, before=begin, between=", ", after="]")


def _new_id() -> str:
    """Return nine letters and digits: Mistral's templates refuse other ids when they come back."""
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
