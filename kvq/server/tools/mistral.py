"""`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, newer: `[TOOL_CALLS]f[ARGS]{...}` for each call.

The latter has been seen without `[ARGS]`, and with `[CALL_ID]` and an id before it.
Source: the chat templates of Mistral Nemo, Mistral Small 3.1 and 3.2, Ministral 3 and Devstral.
"""

import json
import re
import secrets
import string
from collections.abc import Sequence

from kvq.server.tools.format import Tool, ToolFormat, Wording
from kvq.server.tools.grammar import calls, literal, named
from kvq.server.tools.json_calls import call_array, is_name, json_object
from kvq.server.tools.markers import no_call, until_marker
from kvq.server.tools.output import Output
from kvq.server.tools.source import Source, Steps

_BEGIN, _ID, _ARGUMENTS = _MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_WORD = re.compile(r"[^\s\[{]+")


def _read(source: Source, output: Output, tools: Sequence[Tool]) -> Steps[None]:
    while (yield from until_marker(source, output, (_BEGIN,))):
        yield from source.skip_space()
        if (yield from source.peek()) == "[":
            source.take()
            is_call = yield from call_array(source, output)
        else:
            is_call = yield from _named_call(source, output)
        if not is_call:
            yield from no_call(source, output)


def _named_call(source: Source, output: Output) -> Steps[bool]:
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
    if (yield from source.peek()) != "{":
        return False
    source.drop()
    output.start(name)
    yield from json_object(source, output.arguments)
    return True


def _grammar(tools: Sequence[Tool], wording: Wording, max_calls: int) -> str:
    if _ARGUMENTS in wording.template:
        return calls(tools, lambda tool, arguments: _named_rule(tool, arguments, wording), max_calls)
    begin = f"{_BEGIN} [" if f"{_BEGIN} [" in wording.template else f"{_BEGIN}["

    def call(tool: Tool, arguments: str) -> str:
        member = f'{{"name": {named(tool)}, "arguments": '
        return f'{json.dumps(member)} {arguments} "}}"'

    before = literal(begin, wording, _MARKERS)
    return calls(tools, call, max_calls, before=before, between='", "', after='"]"')


def _named_rule(tool: Tool, arguments: str, wording: Wording) -> str:
    begin = literal(f"{_BEGIN}{tool.name}", wording, _MARKERS)
    call_id = f"{literal(_ID, wording, _MARKERS)} /[a-zA-Z0-9]{{9}}/" if _ID in wording.template else ""
    return f"{begin} {call_id} {literal(_ARGUMENTS, wording, _MARKERS)} {arguments}"


def _new_id() -> str:
    """Nine letters and digits: Mistral's templates refuse other ids when they come back."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


MISTRAL = ToolFormat(
    name="mistral",
    machine=_read,
    is_template=lambda template: _BEGIN in template,
    markers=_MARKERS,
    grammar=_grammar,
    new_id=_new_id,
)
