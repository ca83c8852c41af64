"""Kinds of tokens: each part of an answer is told by what it decides, however calls are spelled."""

import json

import pytest

from kvq.traces.kinds import TokenKind, kinds_of

CALL = {
    "name": "move_file",
    "arguments": json.dumps({"from": "a/b 1.txt", "to": {"dir": "c", "deep": [7, True]}}),
}
HERMES = (
    '<tool_call>\n{"name": "move_file", "arguments": {"from": "a/b 1.txt", '
    '"to": {"dir": "c", "deep": [7, true]}}}\n</tool_call>'
)
PYTHONIC = "[move_file(from='a/b 1.txt', to={'dir': 'c', 'deep': [7, true]})]"


def found(text, message):
    """The texts of each kind, characters being tokens."""
    kinds = kinds_of(list(text), message)
    joined = []
    for char, kind in zip(text, kinds, strict=True):
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + char)
        else:
            joined.append((kind, char))
    return [(kind.value, part) for kind, part in joined if kind != TokenKind.STRUCTURE]


@pytest.mark.parametrize("text", [HERMES, PYTHONIC])
@pytest.mark.parametrize("said", ["", "I move it, move_file is 1 tool. "])
def test_calls(text, said):
    message = {"content": said, "tool_calls": [{"function": CALL}]}
    marks = found(said + text, message)
    assert [part for kind, part in marks if kind in ("name", "key", "value")] == [
        *("move_file", "from", "a/b 1.txt", "to", "dir", "c", "deep", "7", "true")
    ]
    assert ("name", "move_file") in marks
    assert [part for kind, part in marks if kind == "key"] == ["from", "to", "dir", "deep"]
    assert ("text" in dict(marks)) == bool(said), "the tool's name in a text is text"


def test_text_numbers_and_code():
    text = "It costs 12.50 euros:\n```python\nx = 3\n```\nat 9:30"
    assert found(text, {"content": text}) == [
        ("text", "It costs "), ("number", "12.50"), ("text", " euros:\n"), ("code", "```python\nx = 3\n```"),
        ("text", "\nat "), ("number", "9:30"),
    ]  # fmt: skip


def test_json_text():
    text = '{"a": [1, "b"], "c": null}'
    assert found(text, {"content": text}) == [
        ("key", '"a"'), ("value", "1"), ("value", '"b"'), ("key", '"c"'), ("value", "null"),
    ]  # fmt: skip


def test_tokens_take_the_kind_of_most_characters():
    message = {"content": None, "tool_calls": [{"function": {"name": "go", "arguments": '{"to": "Oslo"}'}}]}
    pieces = ['{"name": "', "go", '", "arguments": {"', "to", '": "Os', "lo", '"}}', ""]
    assert kinds_of(pieces, message) == [
        *(TokenKind.STRUCTURE, TokenKind.NAME, TokenKind.STRUCTURE, TokenKind.KEY, TokenKind.STRUCTURE),
        *(TokenKind.VALUE, TokenKind.STRUCTURE, TokenKind.STRUCTURE),
    ]


def test_calls_that_are_not_in_the_text():
    message = {"content": "done", "tool_calls": [{"function": {"name": "go", "arguments": "not json"}}]}
    assert found("done", message) == [("text", "done")]
