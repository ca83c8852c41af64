"""Answers with calls: their blocks and their events."""

import json

import pytest

from kvq.server.anthropic.message import _Content
from kvq.server.tools.formats.registry import find_format
from kvq.server.tools.thoughts import Thinking, Thoughts

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


def told(text, size, parser=True, thinking=None):
    """The content of a text that comes in pieces of a size, and its events."""
    content = _Content(find_format("hermes", "").parser() if parser else None, Thoughts(thinking, None))
    events = []
    for end in range(size, len(text) + size, size):
        events += content.feed(text[end - size : end], is_last=end >= len(text))
    return content, [*events, *content.close()]


def rebuilt(events):
    """The blocks as a client puts them together; events out of order fail."""
    blocks, is_open = [], False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"], json=""))
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
        elif (kind := event["delta"]["type"].removesuffix("_delta")) in ("text", "thinking"):
            blocks[-1][kind] += event["delta"][kind]
        else:
            blocks[-1]["json"] += event["delta"]["partial_json"]
    assert not is_open
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use" and text.endswith("}"):
            block["input"] = json.loads(text)
    return blocks


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_text_and_calls_are_blocks_one_after_the_other(size):
    content, events = told(f"I see.\n{CALL}\n{CALL} Done.", size)
    assert [block["type"] for block in content.blocks] == ["text", "tool_use", "tool_use", "text"]
    assert content.blocks[0]["text"] == "I see."
    assert content.blocks[1]["input"] == content.blocks[2]["input"] == {"zone": "UTC"}
    assert content.blocks[1]["id"] != content.blocks[2]["id"]
    assert content.has_calls
    assert rebuilt(events) == content.blocks


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_is_broken_off_has_no_input(size):
    content, events = told(CALL[:55], size)
    assert [(block["name"], block["input"]) for block in content.blocks] == [("now", {})]
    assert rebuilt(events) == content.blocks


@pytest.mark.parametrize("text", ["", "Plain text."])
@pytest.mark.parametrize("parser", [True, False])
def test_text_alone_is_one_block_or_none(text, parser):
    content, events = told(text, 3, parser)
    assert content.blocks == ([{"type": "text", "text": text}] if text else [])
    assert rebuilt(events) == content.blocks
    assert not content.has_calls


def test_without_a_parser_a_call_is_text():
    content, _ = told(CALL, 5, parser=False)
    assert content.blocks == [{"type": "text", "text": CALL}]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_thoughts_are_a_block_of_their_own_before_text_and_calls(size):
    thinking = Thinking(begin="<think>", end="</think>")
    content, events = told(f"<think>\nHm {CALL}\n</think>\n\nSo: {CALL}", size, thinking=thinking)

    assert [block["type"] for block in content.blocks] == ["thinking", "text", "tool_use"]
    assert content.blocks[0] == {"type": "thinking", "thinking": f"Hm {CALL}", "signature": ""}
    assert rebuilt(events)[:2] == content.blocks[:2]
