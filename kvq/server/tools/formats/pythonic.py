"""`[f(a=1), g(b="x")]` at the start of a line: a Python list of calls with literals.

No marker distinguishes calls from other text: a call counts if it names an offered tool. Each call is emitted
when its parenthesis closes. Source: the prompt formats of Llama 3.2 and Llama 4.
"""

import ast
import re
import warnings

from kvq.server.tools.format import ToolFormat
from kvq.server.tools.json_calls import bracket, write_json
from kvq.server.tools.parser import Parser, Steps

_NAME = re.compile(r"[\w.]+")
_PLAIN = re.compile(r"""[^"'()\[\]{}]+""")
_MAX_CALL = 1 << 18  # maximum length of a call that is passed to Python's parser


def _read(parser: Parser) -> Steps[bool]:
    """Emit the calls of a list; return False if the held text is not a call."""
    separator = ","
    while separator == ",":
        yield from parser.skip_space()
        name = yield from parser.all_of(_NAME)
        if name not in parser.tools or (yield from parser.peek()) != "(":
            return False
        parts: list[str] = []
        is_whole = yield from bracket(parser, parts.append, _PLAIN)
        arguments = _arguments("".join(parts)) if is_whole else None
        if arguments is None:
            return False
        parser.drop()
        parser.start(name)
        parser.arguments(arguments)
        parser.hold()
        yield from parser.skip_space()
        separator = yield from parser.one_of((",", "]"))
    if not separator:
        return False
    parser.drop()
    return True


def _arguments(text: str) -> str | None:
    """Return the arguments `(a=1, b="x")` as JSON, or None unless all are named literals."""
    if len(text) > _MAX_CALL:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about unknown escapes
            call = ast.parse(f"f{text}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return None
            values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return None if None in values else write_json(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


PYTHONIC = ToolFormat(
    name="pythonic",
    read=_read,
    is_template=lambda template: "[func_name1(params_name1=" in template,
    wraps=("<|python_start|>",),
    opening="[",
    ends=("<|python_end|>",),
)
