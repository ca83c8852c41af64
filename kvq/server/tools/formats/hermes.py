"""`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call.

Source: the chat templates of Hermes 2 Pro, Qwen 2.5 and Qwen 3.
"""

from kvq.server.tools.format import Spelling, ToolFormat, json_call
from kvq.server.tools.json_calls import call_object
from kvq.server.tools.parser import Parser, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(parser: Parser) -> Steps[bool]:
    if not (yield from parser.word("{")) or not (yield from call_object(parser)):
        return False
    yield from parser.end_of_call(_END)
    return True


def _spelling(_: str) -> Spelling:
    def call(name: str) -> tuple[str, str]:
        begin, end = json_call(name)
        return f"{_BEGIN}\n{begin}", f"{end}\n{_END}"

    return Spelling(call=call, between="\n")


def _is_template(template: str) -> bool:
    # GLM writes <arg_key> between the same tags, Qwen 3 Coder <function=
    others = ("<arg_key>", "<function=")
    return _BEGIN in template and "arguments" in template and not any(word in template for word in others)


HERMES = ToolFormat(
    name="hermes", read=_read, is_template=_is_template, wraps=(_BEGIN,), ends=(_END,), spelling=_spelling
)
