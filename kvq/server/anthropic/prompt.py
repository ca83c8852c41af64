"""Prompts from Anthropic conversations: input for the model's chat template, and cache breakpoints."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from kvq.engine import PrefixPin
from kvq.server.admission.bodies import ChatMessage
from kvq.server.admission.prompts import Conversation, Prompts
from kvq.server.anthropic import bodies
from kvq.server.anthropic.bodies import PromptBody
from kvq.server.http.problems import Problem

T = TypeVar("T")
_MAX_BREAKPOINTS = 4
_OTHER = "\ue000"  # a private-use character, which no user's text continues with


async def prompt_pins(
    prompts: Prompts, body: PromptBody, tokens: Sequence[int], tenant: str
) -> list[PrefixPin]:
    """Return the prefix pins for the body's cache breakpoints.

    A prefix consists of the tokens that do not change if other text follows its last block. This definition
    works for any template.

    Raises:
        Problem: there are too many breakpoints, or the template takes too long.
    """
    found = _breakpoints(body)
    if not found:
        return []
    others = [_changed(body, blocks, at) for blocks, at, _ in found]
    lengths = await prompts.shared_lengths(tokens, conversation(body), others, tenant=tenant)
    return [
        PrefixPin(length=length, seconds=seconds)
        for length, (_, _, seconds) in zip(lengths, found, strict=True)
    ]


def _breakpoints(body: PromptBody) -> list[tuple[list[Any], int, float]]:  # D80
    """Return (list that contains the block, index in the list, seconds to keep) for each breakpoint."""
    lists: list[list[Any]] = [body.tools, body.system, *(message.content for message in body.messages)]
    places = [(blocks, at, block.cache_control) for blocks in lists for at, block in enumerate(blocks)]
    if places and places[-1][2] is None:
        places[-1] = (*places[-1][:2], body.cache_control)
    found = [(blocks, at, control.seconds) for blocks, at, control in places if control is not None]
    if len(found) > _MAX_BREAKPOINTS:
        raise Problem(400, f"cache_control may stand {_MAX_BREAKPOINTS} times, it stands {len(found)} times")
    return found


def _changed(body: PromptBody, blocks: list[Any], at: int) -> Conversation:
    """Return the conversation with different text after a block; do not modify the body."""
    block = blocks[at]
    others = [block]
    if isinstance(block, bodies.CustomTool):
        others.append(block.model_copy(update={"name": _OTHER, "description": _OTHER, "parameters": {}}))
    elif isinstance(block, bodies.TextBlock):
        others = [block.model_copy(update={"text": block.text + _OTHER})]
    elif isinstance(block, bodies.ToolResultBlock):
        content = [*block.content, bodies.TextBlock(type="text", text=_OTHER)]
        others = [block.model_copy(update={"content": content})]
    elif isinstance(block, bodies.ToolUseBlock):
        others = [block.model_copy(update={"input": block.input | {_OTHER: ""}})]
    blocks[at : at + 1] = others
    changed = conversation(body)
    blocks[at : at + len(others)] = [block]
    return changed


def conversation(body: PromptBody) -> Conversation:
    """Return the conversation in the form that the model's chat template expects.

    Consecutive turns of the same role are merged, as in Anthropic's API, because templates require
    alternating roles. If the last turn is the assistant's, the model continues that turn.

    Raises:
        Problem: the last turn can't be continued.
    """
    messages: list[ChatMessage] = []
    if body.system:
        messages.append(ChatMessage(role="system", content=text_of(body.system)))
    names: dict[str, str] = {}  # of called tools, keyed by call id
    for role, turns in groupby(body.messages, key=lambda message: message.role):
        if role == "user":
            messages += _user(list(turns), names)
        else:
            messages.append(_assistant(list(turns), names))
    options = _ending(body.messages[-1])
    if body.thinking is not None:
        options["enable_thinking"] = body.thinking.type != "disabled"
    if body.tools and body.tool_choice.type != "none":  # otherwise nothing would parse the model's calls
        shown = {"name", "description", "parameters"}
        functions = [tool.model_dump(include=shown, exclude_none=True) for tool in body.tools]
        options["tools"] = [{"type": "function", "function": function} for function in functions]
    return messages, options


def _user(turns: Sequence[bodies.Message], names: dict[str, str]) -> Iterator[ChatMessage]:
    """Yield the messages for the user's turns; each tool result becomes a separate message."""
    parts: list[str | ChatMessage] = []
    for turn in turns:
        for is_result, blocks in groupby(turn.content, key=lambda block: block.type == "tool_result"):
            if is_result:
                parts += [_result(block, names) for block in _only(bodies.ToolResultBlock, blocks)]
            else:
                parts.append(text_of(blocks))
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            yield ChatMessage(role="user", content="\n\n".join(_only(str, run)))
        else:
            yield from _only(ChatMessage, run)


def _result(block: bodies.ToolResultBlock, names: dict[str, str]) -> ChatMessage:
    named = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
    return ChatMessage.model_validate(
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)} | named
    )


def _assistant(turns: Sequence[bodies.Message], names: dict[str, str]) -> ChatMessage:
    texts = [text_of(turn.content) for turn in turns]
    calls = []
    for block in (block for turn in turns for block in _only(bodies.ToolUseBlock, turn.content)):
        names[block.id] = block.name
        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
        calls.append({"id": block.id, "function": function})
    content = "\n\n".join(text for text in texts if text)
    thoughts = "".join(
        block.thinking for turn in turns for block in _only(bodies.ThinkingBlock, turn.content)
    )
    own = {"reasoning_content": thoughts} if thoughts else {}
    return ChatMessage.model_validate(
        {"role": "assistant", "content": content, "tool_calls": calls or None} | own
    )


def _ending(last: bodies.Message) -> dict[str, Any]:
    if last.role == "user":
        return {"add_generation_prompt": True}
    text = text_of(last.content[-1:])
    if not text or text[-1].isspace():
        raise Problem(
            400, "the assistant's last turn is continued: it has to end in text, and not in white space"
        )
    return {"continue_final_message": True}


def _only(kind: type[T], items: Iterable[object]) -> list[T]:
    return [item for item in items if isinstance(item, kind)]


def text_of(blocks: Iterable[object]) -> str:
    """Return the concatenated text of all text blocks."""
    return "".join(block.text for block in _only(bodies.TextBlock, blocks))
