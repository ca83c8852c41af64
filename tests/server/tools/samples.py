"""Answers in each format, and what is in them."""

import json

from kvq.server.tools.format import Tool
from kvq.server.tools.formats.registry import FORMATS
from kvq.server.tools.json_calls import PLAIN

BAR, LOW = "\uff5c", "\u2581"
TOOLS = [
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "where": {"type": "object"},
            },
            "required": ["city"],
        },
    ),
    Tool(name="now"),
]
WEATHER = {
    "city": 'Århus "Ø" 東京 🌧 \\ }]</tool',
    "days": 3,
    "where": {"at": [1.5, -2, {"deep": [None, True]}], "x": "{["},
}


def deepseek(words):
    return f"<{BAR}{words.replace(' ', LOW)}{BAR}>"


def hermes(name, arguments):
    body = f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
    return f"<tool_call>\n{body}\n</tool_call>\n"


def llama3(name, arguments):
    return json.dumps({"name": name, "parameters": arguments})


def coder(name, arguments):
    text = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{text}</function>\n</tool_call>\n"


def v3(name, arguments):
    begin, end = deepseek("tool call begin"), deepseek("tool call end")
    return f"{begin}function{deepseek('tool sep')}{name}\n```json\n{json.dumps(arguments)}\n```{end}\n"


def v31(name, arguments):
    begin, end = deepseek("tool call begin"), deepseek("tool call end")
    return f"{begin}{name}{deepseek('tool sep')}{json.dumps(arguments)}{end}"


def section(call):
    return lambda calls: (
        deepseek("tool calls begin") + "".join(call(*one) for one in calls) + deepseek("tool calls end")
    )


def array(calls):
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def numbered(calls):
    return json.dumps(
        [{"name": name, "arguments": arguments, "id": "abc123DEF"} for name, arguments in calls]
    )


def joined(call, between=""):
    return lambda calls: between.join(call(*one) for one in calls)


def python(calls):
    texts = [f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls]
    return f"[{', '.join(texts)}]"


# Format, how several calls are written, whether text may stand before them on the same line
SPELLINGS = {
    "hermes": ("hermes", joined(hermes), True),
    "qwen3_coder": ("qwen3_coder", joined(coder), True),
    "llama3_json": ("llama3_json", joined(llama3, "; "), False),
    "llama3_json tagged": ("llama3_json", lambda calls: "<|python_tag|>" + joined(llama3, "\n")(calls), True),
    "mistral array": ("mistral", lambda calls: "[TOOL_CALLS] " + numbered(calls), True),
    "mistral": ("mistral", joined(lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}"), True),
    "mistral ids": (
        "mistral",
        joined(lambda n, a: f"[TOOL_CALLS]{n}[CALL_ID]abc123DEF[ARGS]{json.dumps(a)}"),
        True,
    ),
    "mistral bare": ("mistral", joined(lambda n, a: f"[TOOL_CALLS]{n}{json.dumps(a)}"), True),
    "deepseek_v3": ("deepseek_v3", section(v3), True),
    "deepseek_v31": ("deepseek_v3", section(v31), True),
    "pythonic": ("pythonic", python, False),
    "pythonic tagged": ("pythonic", lambda c: f"<|python_start|>{python(c)}<|python_end|>", True),
    "plain": ("plain", array, False),
}
ALL = FORMATS | {"plain": PLAIN}


def events_of(format, pieces, tools=TOOLS, **options):
    """All events of an answer."""
    parser = ALL[format].parser(tools, **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.close()


def read(format, pieces, tools=TOOLS, **options):
    """(text, [(name, arguments' text)]) of an answer; the events' order is checked."""
    text, calls, ids = "", [], set()
    for event in events_of(format, pieces, tools, **options):
        if event.call is None:
            assert event.text
            assert (event.id, event.name) == (None, None)
            text += event.text
        elif event.name is not None:
            assert event.call == len(calls)
            assert event.text == ""
            ids.add(event.id)
            calls.append((event.name, ""))
        else:
            assert event.id is None
            assert event.call == len(calls) - 1
            name, before = calls[-1]
            calls[-1] = (name, before + event.text)
    assert len(ids) == len(calls), "no two calls have the same id"
    return text, calls
