"""`[{"name": "f", "arguments": {...}}, ...]`, for forced calls where the model's format is no help."""

from kvq.server.tools.format import Spelling, ToolFormat, json_call
from kvq.server.tools.json_calls import call_array

PLAIN = ToolFormat(
    name="plain",
    read=call_array,
    is_template=lambda _: False,
    opening="[",
    spelling=lambda _: Spelling(call=json_call, before="[", between=", ", after="]"),
)
