"""`[{"name": "f", "arguments": {...}}, ...]`, for forced calls where the model's format is no help."""

import json
from collections.abc import Sequence

from kvq.server.tools.format import Tool, ToolFormat, Wording
from kvq.server.tools.grammar import calls, named
from kvq.server.tools.json_calls import call_array
from kvq.server.tools.markers import no_call, until_marker
from kvq.server.tools.output import Output
from kvq.server.tools.source import Source, Steps


def _read(source: Source, output: Output, tools: Sequence[Tool]) -> Steps[None]:
    names = {tool.name for tool in tools}
    while (yield from until_marker(source, output, (), openings="[")):
        if not (yield from call_array(source, output, names)):
            yield from no_call(source, output)


def _grammar(tools: Sequence[Tool], _: Wording, max_calls: int) -> str:
    def call(tool: Tool, arguments: str) -> str:
        begin = f'{{"name": {named(tool)}, "arguments": '
        return f'{json.dumps(begin)} {arguments} "}}"'

    return calls(tools, call, max_calls, before='"["', between='", "', after='"]"')


PLAIN = ToolFormat(name="plain", machine=_read, is_template=lambda _: False, grammar=_grammar)
