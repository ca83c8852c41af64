"""Every format: what is a call is given out as one, what is none as text, however the text is cut."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.tools.samples import ALL, BAR, LOW, SPELLINGS, TOOLS, WEATHER, events_of, hermes, read

CALLS = [("get_weather", WEATHER), ("now", {})]


@pytest.fixture(params=SPELLINGS)
def spelling(request):
    return SPELLINGS[request.param]


def parsed(result):
    text, calls = result
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def test_calls_whole(spelling):
    format, write, _ = spelling
    assert parsed(read(format, [write(CALLS[:1])])) == ("", CALLS[:1])
    assert parsed(read(format, [write(CALLS)])) == ("", CALLS)


def test_calls_cut_at_every_position(spelling):
    format, write, _ = spelling
    text = write(CALLS)
    whole = read(format, [text])
    for at in range(len(text) + 1):
        assert read(format, [text[:at], text[at:]]) == whole, at
    assert read(format, text) == whole, "one character at a time"


def test_calls_behind_text_and_text_behind_calls(spelling):
    format, write, is_inline = spelling
    before = "Let me look, a < b [0]." + (" " if is_inline else "\n\n")
    for tail in ("", "\n", "\nDone <b>."):
        text = before + write(CALLS) + tail
        expected = before.rstrip() + tail.rstrip()
        for seed in range(10):
            shown, calls = parsed(read(format, chunks(text, random.Random(seed))))
            assert calls == CALLS
            assert shown.split() == expected.split()
            assert shown == shown.rstrip()


def chunks(text, rng):
    while text:
        size = rng.choice((1, 2, 3, 7, 30))
        yield text[:size]
        text = text[size:]


def test_nothing_of_a_marker_is_shown_while_a_call_may_follow(spelling):
    format, write, _ = spelling
    parser = ALL[format].parser(TOOLS)
    for char in write(CALLS):
        assert not any(event.call is None for event in parser.feed(char))


def test_arguments_grow_while_they_are_written(spelling):
    format, write, _ = spelling
    if format in ("qwen3_coder", "pythonic"):
        pytest.skip("comes value by value, or call by call")
    text = write([("get_weather", {"city": "x" * 1000})])
    parser = ALL[format].parser(TOOLS)
    events = parser.feed(text[: text.index("xxx") + 500])
    assert [(event.call, event.name) for event in events] == [(0, "get_weather"), (0, None)]
    assert "x" * 499 in events[1].text


def test_a_broken_off_answer_is_never_an_error_and_never_whole(spelling):
    format, write, _ = spelling
    text = write(CALLS[:1]).rstrip()
    [(_, whole)] = read(format, [text])[1]
    for end in range(len(text)):
        shown, calls = read(format, [text[:end]])
        if calls:
            [(name, arguments)] = calls
            assert (name, shown) == ("get_weather", "")
            assert whole.startswith(arguments)
        else:
            assert shown == text[:end]


def test_a_second_call_that_breaks_off_is_no_text():
    for format, write, _ in SPELLINGS.values():
        text = write(CALLS)
        for end in range(len(text)):
            shown, calls = read(format, [text[:end]])
            assert not calls or not shown, text[:end]


def test_calls_beyond_the_allowed_are_left_out(spelling):
    format, write, _ = spelling
    assert parsed(read(format, [write(CALLS)], max_calls=1)) == ("", CALLS[:1])


NO_CALLS = [
    "",
    " ",
    "Hello!",
    "\n\n  x \n",
    "a < b, [1, 2], {3}",
    '{"city": "Rome", "name": "Bob"}',
    '{"name": "Bob", "parameters": {}}',
    '{"name": "get_weather"}',
    '{"name": "get_weather", "age": 3, "parameters": {}}',
    '[{"name": "Bob", "arguments": {}}]',
    "[Bob(a=1)]",
    "[get_weather(1)]",
    "[get_weather(city=open('x'))]",
    "[get_weather(**{})]",
    "[get_weather(city=1e999)]",
    "[get_weather(city={1, 2})]",
    "[get_weather(city=b'')]",
    "[get_weather(city=" + "(" * 3000 + ")" * 3000 + ")]",
    "[get_weather(city=" + "-" * 100_000 + "1)]",
    "[get_weather",
    "see [get_weather(city='x')]",
    'see {"name": "get_weather", "parameters": {}}',
    "<tool_call>",
    "<tool_call> is a tag",
    "<tool_call>\nnot json\n</tool_call>",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments"}</tool_call>',
    '<tool_call>{name: "f", "arguments": {}}</tool_call>',
    "</tool_call>",
    "<tool_<tool_call<too",
    "<function=>x</function>",
    "<function=a b>x</function>",
    "<tool_call><func=x></tool_call>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS] see there",
    "[TOOL_CALLS] [1, 2]",
    "[TOOL_CALLS]f[ARG]{}",
    "[TOOL_CALLS]f[ARGS]no",
    "[TOOL_[TOOL_CALL",
    "<|python_tag|>import os",
    "<|python_start|>x<|python_end|>",
    f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>f",
    f"<{BAR}tool{LOW}call{LOW}begin{BAR}>function<{BAR}tool{LOW}sep{BAR}>f\n```python\n{{}}```",
]


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("text", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_call_is_text(format, text):
    if format == "hermes" and '{"name": "f"' in text and '"arguments": {' in text:
        pytest.skip("is a call")
    for pieces in ([text], text, chunks(text, random.Random(0))):
        assert read(format, pieces) == (text, [])


ALPHABET = st.sampled_from(
    [
        "<",
        ">",
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        '"',
        "'",
        "\\",
        ":",
        ",",
        ";",
        "=",
        "\n",
        " ",
        "a",
        "é",
        "🌧",
        "`",
        "#",
    ]
    + ["<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=a>", "</parameter>"]
    + [
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        '"name": ',
        '"arguments": ',
        '"now"',
        "now(",
        "function",
        "```json",
    ]
    + [f"<{BAR}tool{LOW}{word}{BAR}>" for word in ("calls▁begin", "call▁begin", "sep", "call▁end")]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ALPHABET, max_size=40), st.randoms(use_true_random=False))
def test_any_text_is_read_alike_however_it_is_cut(parts, rng):
    text = "".join(parts)
    for format in ALL:
        whole = read(format, [text])
        assert read(format, chunks(text, rng)) == whole
        assert read(format, text) == whole
        if not whole[1]:
            assert whole[0] == text


def test_names_and_arguments_in_any_order_and_as_text():
    for body in (
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"id": "x", "type": "function", "extra": [{}, "]"], "name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    ):
        assert read("hermes", f"<tool_call>{body}</tool_call>") == ("", [("f", '{"a": 1}')])
    assert read("hermes", '<tool_call>{"name": "f"}</tool_call>') == ("", [("f", "{}")])
    assert read("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>') == ("", [("f", "{}")])


def test_a_call_that_goes_wrong_late_does_not_spoil_the_next():
    wrong = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'  # a bracket is missing
    assert parsed(read("hermes", wrong + hermes("now", {}))) == ("", [("f", {"a": 1}), ("now", {})])
    wrong = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, oops] x'
    assert read("mistral", wrong) == (", oops] x", [("f", "{}")])
    wrong = "[now(), now(x)] y"
    assert read("pythonic", wrong) == (", now(x)] y", [("now", "{}")])
    wrong = "<tool_call><function=now><parameter=a>1</parameter> oops</function></tool_call> x"
    assert parsed(read("qwen3_coder", wrong)) == (" oops x", [("now", {"a": 1})])


def test_half_surrogates_can_be_sent():
    for format, text in (
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        ("pythonic", "[now(a='\\ud800')]"),
    ):
        _, [(_, arguments)] = read(format, text)
        assert json.loads(arguments.encode()) == {"a": "\ud800"}


def test_coder_values_are_what_the_schema_says():
    text = "<function=get_weather><parameter=city>\n12\n</parameter><parameter=days>12</parameter></function>"
    assert parsed(read("qwen3_coder", text)) == ("", [("get_weather", {"city": "12", "days": 12})])
    text = "<function=other><parameter=a>True</parameter><parameter=b>\n x\ny </parameter></function>"
    assert parsed(read("qwen3_coder", text)) == ("", [("other", {"a": True, "b": " x\ny "})])


LONG = {
    "hermes": '<tool_call>{"a": [' * 10_000,
    "llama3_json": "\n" * 50_000 + "x",
    "mistral": '[TOOL_CALLS][{"arguments": {"a": "' + "x" * 200_000,
    "pythonic": "[now(a=[" + "1, " * 60_000,
    "qwen3_coder": "<tool_call><function=now><parameter=a>" + "<" * 100_000,
}


@pytest.mark.parametrize("format", LONG)
def test_work_is_linear_in_the_text(format):
    """Each of these would take minutes if what is held were read again for every piece."""
    text = LONG[format]
    events_of(format, (text[i : i + 4] for i in range(0, len(text), 4)))


def test_ids_are_the_formats_own():
    start = events_of("hermes", hermes("f", {"a": 1}))[0]
    assert start.id.startswith("call_")
    start = events_of("mistral", "[TOOL_CALLS]f{}")[0]
    assert len(start.id) == 9
    assert start.id.isalnum()
