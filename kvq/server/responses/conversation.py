"""Conversations of the Responses API as chats: items become messages, and a body a chat's body."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from kvq.server.admission.bodies import ChatBody, Common
from kvq.server.http.problems import Problem
from kvq.server.responses.bodies import LOGPROBS, AllowedTools, ResponsesBody

_ASSISTANTS = ("assistant", "reasoning", "function_call")  # roles of messages, and types of other items
_OWN = ("n", "response_format", "stream", "stream_options")  # fields that the chat gets from here


def chat_body(body: ResponsesBody) -> ChatBody:
    """Return the chat that generates the response; raise ValidationError if it exceeds a chat's bounds."""
    shared = (body.model_fields_set & Common.model_fields.keys()) - set(_OWN)
    begun = [{"role": "system", "content": body.instructions}] if body.instructions else []
    format, choice, effort = body.text.format, body.tool_choice, body.reasoning.effort
    tools = body.tools
    if isinstance(choice, AllowedTools):
        tools, choice = _allowed(tools, choice), choice.mode
    named = None if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
    wants_logprobs = LOGPROBS in body.include
    schema = {"schema": format.definition, "strict": format.strict} if format.definition is not None else None
    given = {name: getattr(body, name) for name in shared} | {
        "messages": [*begun, *_messages(body.input)],
        "tools": [{"type": "function", "function": tool} for tool in tools] or None,
        "tool_choice": named or choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": {"type": format.type, "json_schema": schema},
        "logprobs": wants_logprobs,
        "top_logprobs": body.top_logprobs if wants_logprobs else None,
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": None if effort == "none" else effort,
        "chat_template_kwargs": {"enable_thinking": False} if effort == "none" else None,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return ChatBody.model_validate(given)


def _allowed(tools: Sequence[Any], choice: AllowedTools) -> list[Any]:
    """Return the tools that a choice allows; raise Problem if it names another one."""
    names = {tool.name for tool in choice.tools}
    if unknown := sorted(names - {tool.name for tool in tools}):
        raise Problem(400, f"tool_choice allows no tool of this request: {unknown[0]}", param="tool_choice")
    return [tool for tool in tools if tool.name in names]


def _messages(items: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of items; neighbours of the assistant are one turn, as templates require."""
    for is_own, run in groupby(items, key=lambda item: getattr(item, "role", item.type) in _ASSISTANTS):
        if is_own:
            yield from _turn([*run])
            continue
        for item in run:
            if item.type == "message":
                yield {"role": item.role, "content": _text(item.content)}
            else:
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}


def _turn(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the message of the assistant's items, unless it only thought."""
    texts, thoughts, calls = list[str](), list[str](), []
    for item in items:
        if item.type == "message":
            texts.append(_text(item.content))
        elif item.type == "reasoning":
            thoughts += [part.text for part in item.content or item.summary]
        else:
            function = {"name": item.name, "arguments": item.arguments}
            calls.append({"id": item.call_id, "function": function})
    if texts or calls:
        own = {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
        content = "\n\n".join(filter(None, texts)) or (None if calls else "")
        yield {"role": "assistant", "content": content, "tool_calls": calls or None} | own


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
