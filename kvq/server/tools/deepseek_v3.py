"""DeepSeek's calls, in a section of their own; its markers have wide bars and low blocks, here left out.

V3 and R1: `<tool call begin>function<tool sep>f`, a fenced block of JSON, `<tool call end>`.
V3.1: `<tool call begin>f<tool sep>{...}<tool call end>`.
Source: the chat templates of DeepSeek V3, R1 and V3.1.
"""

import re
from collections.abc import Sequence

from kvq.server.tools.format import Tool, ToolFormat, Wording
from kvq.server.tools.grammar import calls, literal
from kvq.server.tools.json_calls import is_name, json_object
from kvq.server.tools.markers import end_of_call, no_call, until_marker
from kvq.server.tools.output import Output
from kvq.server.tools.source import Source, Steps


def _mark(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN_ALL, _END_ALL = _mark("tool calls begin"), _mark("tool calls end")
_BEGIN, _SEPARATOR, _END = _mark("tool call begin"), _mark("tool sep"), _mark("tool call end")
_MARKERS = (_BEGIN_ALL, _END_ALL, _BEGIN, _SEPARATOR, _END)
_FENCE, _CLOSING_FENCE = "```json", "```"
_WORD = re.compile(r"[^\s<{`]+")


def _read(source: Source, output: Output, tools: Sequence[Tool]) -> Steps[None]:
    while marker := (yield from until_marker(source, output, (_BEGIN_ALL, _BEGIN), ends=(_END, _END_ALL))):
        if marker == _BEGIN_ALL:
            yield from source.skip_space()
            if not (yield from source.word(_BEGIN)):
                yield from no_call(source, output)
                continue
        if not (yield from _call(source, output)):
            yield from no_call(source, output)


def _call(source: Source, output: Output) -> Steps[bool]:
    name = yield from source.all_of(_WORD)
    if not (yield from source.word(_SEPARATOR)):
        return False
    yield from source.skip_space()
    char = yield from source.peek()
    if char not in ("{", "`"):  # what came first was the type
        name = yield from source.all_of(_WORD)
        yield from source.skip_space()
    is_fenced = (yield from source.peek()) == "`"
    if is_fenced:
        if not (yield from source.word(_FENCE)):
            return False
        yield from source.skip_space()
    if not is_name(name) or (yield from source.peek()) != "{":
        return False
    source.drop()
    output.start(name)
    yield from json_object(source, output.arguments)
    if is_fenced:
        yield from end_of_call(source, output, _CLOSING_FENCE)
    yield from end_of_call(source, output, _END)
    return True


def _grammar(tools: Sequence[Tool], wording: Wording, max_calls: int) -> str:
    is_fenced = _FENCE in wording.template

    def call(tool: Tool, arguments: str) -> str:
        begin = (
            f"{_BEGIN}function{_SEPARATOR}{tool.name}\n{_FENCE}\n"
            if is_fenced
            else _BEGIN + tool.name + _SEPARATOR
        )
        end = f"\n{_CLOSING_FENCE}{_END}" if is_fenced else _END
        return f"{literal(begin, wording, _MARKERS)} {arguments} {literal(end, wording, _MARKERS)}"

    return calls(
        tools,
        call,
        max_calls,
        before=literal(_BEGIN_ALL, wording, _MARKERS),
        between='"\\n"' if is_fenced else "",
        after=literal(_END_ALL, wording, _MARKERS),
    )


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    machine=_read,
    is_template=lambda template: _BEGIN_ALL in template,
    markers=_MARKERS,
    grammar=_grammar,
    is_text_template=True,
)
