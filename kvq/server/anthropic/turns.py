"""Anthropic's turns as the turns of a chat template, and what lies behind their breakpoints."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from kvq.server.anthropic.blocks import CacheControl, Marked, TextBlock, ToolResultBlock, ToolUseBlock
from kvq.server.anthropic.bodies import Message, PromptBody
from kvq.server.anthropic.offer import template_tools
from kvq.server.bodies import ChatMessage
from kvq.server.problems import Problem
from kvq.server.prompts import Conversation
from kvq.server.tool_bodies import CalledFunction, ToolCallBody

T = TypeVar("T")
MAX_BREAKPOINTS = 4
_OTHER = "\ue000"  # for private use: nobody's text goes on with it


def conversation(body: PromptBody, changed: Marked | None = None) -> Conversation:
    """What the model's template is given.

    Turns of one role after another are one turn, as Anthropic has it: templates want roles to alternate.
    A last turn of the assistant is continued. `changed`: a block behind which something else is to follow.

    Raises:
        Problem: the assistant's last turn can't be continued.
    """
    messages: list[ChatMessage] = []
    if body.system:
        messages.append(ChatMessage(role="system", content=_text(body.system, changed)))
    names: dict[str, str] = {}  # of the tools that were called
    for role, turns in groupby(body.messages, key=lambda message: message.role):
        if role == "user":
            messages += _user(list(turns), names, changed)
        else:
            messages.append(_assistant(list(turns), names, changed))
    options = _ending(body.messages[-1])
    if (tools := template_tools(body, changed, _OTHER)) is not None:
        options["tools"] = tools
    return Conversation(messages=messages, options=options)


def breakpoints(body: PromptBody) -> list[tuple[Marked, CacheControl]]:
    """The blocks that breakpoints lie behind.

    Raises:
        Problem: too many of them.
    """
    in_turns: Iterator[Marked] = (block for message in body.messages for block in message.content)
    blocks: list[Marked] = [*body.tools, *body.system, *in_turns]
    found = [(block, block.cache_control) for block in blocks if block.cache_control is not None]
    if body.cache_control is not None and blocks and blocks[-1].cache_control is None:
        found.append((blocks[-1], body.cache_control))
    if len(found) > MAX_BREAKPOINTS:
        raise Problem(400, f"cache_control may stand {MAX_BREAKPOINTS} times, it stands {len(found)} times")
    return found


def _user(turns: Sequence[Message], names: dict[str, str], changed: Marked | None) -> Iterator[ChatMessage]:
    """Results of calls are turns of their own."""
    parts: list[str | ChatMessage] = []
    for turn in turns:
        for is_result, blocks in groupby(turn.content, key=lambda block: isinstance(block, ToolResultBlock)):
            if is_result:
                parts += [_result(block, names, changed) for block in _only(ToolResultBlock, blocks)]
            else:
                parts.append(_text(_only(TextBlock, blocks), changed))
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            yield ChatMessage(role="user", content="\n\n".join(_only(str, run)))
        else:
            yield from _only(ChatMessage, run)


def _result(block: ToolResultBlock, names: dict[str, str], changed: Marked | None) -> ChatMessage:
    content = _text(block.content, changed) + (_OTHER if block is changed else "")
    named = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
    return ChatMessage.model_validate(
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": content} | named
    )


def _assistant(turns: Sequence[Message], names: dict[str, str], changed: Marked | None) -> ChatMessage:
    texts = [_text(_only(TextBlock, turn.content), changed) for turn in turns]
    calls = []
    for block in (block for turn in turns for block in _only(ToolUseBlock, turn.content)):
        names[block.id] = block.name
        arguments = block.input | ({_OTHER: ""} if block is changed else {})
        function = CalledFunction(name=block.name, arguments=json.dumps(arguments, ensure_ascii=False))
        calls.append(ToolCallBody(id=block.id, function=function))
    content = "\n\n".join(text for text in texts if text)
    return ChatMessage(role="assistant", content=content, tool_calls=calls or None)


def _ending(last: Message) -> dict[str, Any]:
    if last.role == "user":
        return {"add_generation_prompt": True}
    text = _text(_only(TextBlock, last.content[-1:]), None)
    if not text or text[-1].isspace():
        raise Problem(
            400, "the assistant's last turn is continued: it has to end in text, and not in white space"
        )
    return {"continue_final_message": True}


def _only(kind: type[T], items: Iterable[object]) -> list[T]:
    return [item for item in items if isinstance(item, kind)]


def _text(blocks: Sequence[TextBlock], changed: Marked | None) -> str:
    return "".join(block.text + (_OTHER if block is changed else "") for block in blocks)
