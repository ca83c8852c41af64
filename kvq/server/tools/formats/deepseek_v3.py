"""DeepSeek's calls, in a separate section of the output. The real markers contain wide bars and low blocks.

V3 and R1: `<tool call begin>function<tool sep>f`, a fenced block of JSON, `<tool call end>`.
V3.1: `<tool call begin>f<tool sep>{...}<tool call end>`.
Source: the chat templates of DeepSeek V3, R1 and V3.1.
"""

import re

from kvq.server.tools.format import Spelling, ToolFormat
from kvq.server.tools.json_calls import call_named
from kvq.server.tools.parser import Parser, Steps


def _mark(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN_ALL, _END_ALL = _mark("tool calls begin"), _mark("tool calls end")
_BEGIN, _SEPARATOR, _END = _mark("tool call begin"), _mark("tool sep"), _mark("tool call end")
_FENCE, _CLOSING_FENCE = "```json", "```"
_WORD = re.compile(r"[^\s<{`]+")


def _read(parser: Parser) -> Steps[bool]:
    name = yield from parser.all_of(_WORD)
    if not (yield from parser.word(_SEPARATOR)):
        return False
    yield from parser.skip_space()
    if (yield from parser.peek()) not in ("{", "`"):  # the first word is the type
        name = yield from parser.all_of(_WORD)
        yield from parser.skip_space()
    is_fenced = (yield from parser.peek()) == "`"
    if is_fenced:
        if not (yield from parser.word(_FENCE)):
            return False
        yield from parser.skip_space()
    if not (yield from call_named(parser, name)):
        return False
    if is_fenced:
        yield from parser.end_of_call(_CLOSING_FENCE)
    yield from parser.end_of_call(_END)
    return True


def _spelling(template: str) -> Spelling:
    if _FENCE in template:
        return Spelling(
            call=lambda name: (
                f"{_BEGIN}function{_SEPARATOR}{name}\n{_FENCE}\n",
                f"\n{_CLOSING_FENCE}{_END}",
            ),
            before=_BEGIN_ALL,
            between="\n",
            after=_END_ALL,
        )
    return Spelling(call=lambda name: (_BEGIN + name + _SEPARATOR, _END), before=_BEGIN_ALL, after=_END_ALL)


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    read=_read,
    is_template=lambda template: _BEGIN_ALL in template,
    wraps=(_BEGIN_ALL,),
    opening=_BEGIN,
    ends=(_END, _END_ALL),
    inner=(_SEPARATOR,),
    spelling=_spelling,
)
