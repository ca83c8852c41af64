"""`{"name": "f", "parameters": {...}}` at the start of a line, bare or after `<|python_tag|>`.

No marker sets calls apart from other JSON: an object that names an offered tool and has parameters is a call.
Source: the chat templates of Llama 3.1 to 4.
"""

import re

from kvq.server.tools.format import Spelling, ToolFormat, json_call
from kvq.server.tools.json_calls import call_object
from kvq.server.tools.parser import Parser, Steps

_BEGINS = ("<|python_tag|>", "<|python_start|>")
_BETWEEN = re.compile(r"[\s;,]+")


def _read(parser: Parser) -> Steps[bool]:
    """Parse a call, and skip the separator before the next call."""
    if not (yield from call_object(parser, parser.tools)):
        return False
    parser.hold()
    yield from parser.all_of(_BETWEEN)
    if (yield from parser.peek()) == "{":
        parser.drop()
    else:
        yield from parser.no_call()
    return True


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    read=_read,
    is_template=lambda text: '"parameters": ' in text and any(x in text for x in (*_BEGINS, "ipython")),
    wraps=_BEGINS,
    opening="{",
    ends=("<|python_end|>",),
    spelling=lambda _: Spelling(call=lambda name: json_call(name, "parameters"), max_calls=1),
)
