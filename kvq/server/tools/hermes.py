"""`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once for each call.

Source: the chat templates of Hermes 2 Pro, Qwen 2.5 and Qwen 3.
"""

from collections.abc import Sequence

from kvq.server.tools.format import Tool, ToolFormat, Wording
from kvq.server.tools.grammar import calls, literal, named
from kvq.server.tools.json_calls import call_object
from kvq.server.tools.markers import end_of_call, no_call, until_marker
from kvq.server.tools.output import Output
from kvq.server.tools.source import Source, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(source: Source, output: Output, tools: Sequence[Tool]) -> Steps[None]:
    while (yield from until_marker(source, output, (_BEGIN,), ends=(_END,))):
        yield from source.skip_space()
        if (yield from source.word("{")) and (yield from call_object(source, output)):
            yield from end_of_call(source, output, _END)
        else:
            yield from no_call(source, output)


def _grammar(tools: Sequence[Tool], wording: Wording, max_calls: int) -> str:
    def call(tool: Tool, arguments: str) -> str:
        begin = literal(f'{_BEGIN}\n{{"name": {named(tool)}, "arguments": ', wording, (_BEGIN,))
        end = literal("}\n" + _END, wording, (_END,))
        return f"{begin} {arguments} {end}"

    return calls(tools, call, max_calls, between='"\\n"')


def _is_template(template: str) -> bool:
    # GLM writes <arg_key> between the same tags, Qwen 3 Coder <function=
    others = ("<arg_key>", "<function=")
    return _BEGIN in template and "arguments" in template and not any(word in template for word in others)


HERMES = ToolFormat(
    name="hermes", machine=_read, is_template=_is_template, markers=(_BEGIN, _END), grammar=_grammar
)
