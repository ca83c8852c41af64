"""`{"name": "f", "parameters": {...}}` at the start of a line, bare or behind `<|python_tag|>`.

No marker tells such an object from other JSON: it is a call if it names a tool on offer and has parameters.
Source: the chat templates of Llama 3.1 to 4.
"""

import json
import re
from collections.abc import Sequence

from kvq.server.tools.format import Tool, ToolFormat, Wording
from kvq.server.tools.grammar import calls, named
from kvq.server.tools.json_calls import call_object
from kvq.server.tools.markers import no_call, until_marker
from kvq.server.tools.output import Output
from kvq.server.tools.source import Source, Steps

_BEGINS, _END = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"
_BETWEEN = re.compile(r"[\s;,]+")


def _read(source: Source, output: Output, tools: Sequence[Tool]) -> Steps[None]:
    names = {tool.name for tool in tools}
    while marker := (yield from until_marker(source, output, _BEGINS, ends=(_END,), openings="{")):
        if marker != "{":
            yield from source.skip_space()
        is_object = marker == "{" or (yield from source.word("{"))
        if is_object and (yield from call_object(source, output, names)):
            yield from _between(source, output)
        else:
            yield from no_call(source, output)


def _between(source: Source, output: Output) -> Steps[None]:
    """Leave out what separates two calls."""
    source.hold()
    yield from source.all_of(_BETWEEN)
    if (yield from source.peek()) == "{":
        source.drop()
    else:
        yield from no_call(source, output)


def _grammar(tools: Sequence[Tool], _: Wording, __: int) -> str:
    """One call: the templates take no more in a turn."""

    def call(tool: Tool, arguments: str) -> str:
        begin = f'{{"name": {named(tool)}, "parameters": '
        return f'{json.dumps(begin)} {arguments} "}}"'

    return calls(tools, call, 1)


def _is_template(template: str) -> bool:
    return '"parameters": ' in template and any(word in template for word in (*_BEGINS, "ipython"))


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    machine=_read,
    is_template=_is_template,
    markers=(*_BEGINS, _END),
    grammar=_grammar,
)
