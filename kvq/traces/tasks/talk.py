"""A conversation in the making: requests, the one call that answers each, and the results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RULES = (
    "Answer every request of the user with exactly one call of the tool that does what the request says. "
    "Copy ids, names, dates, numbers and texts exactly as they stand in the conversation."
)
_CHARS_PER_TOKEN = 4  # a rough count, for any tokenizer
_SPARE = 1100  # characters that requests, calls and short results take


@dataclass(frozen=True, slots=True)
class Request:
    """A user's wish in words, the right call, and its result."""

    words: str
    tool: str
    arguments: Mapping[str, Any]
    result: str = ""
    last: str | float | None = None  # what the next request can mean by what was last


class Talk:
    """Conversation that grows by one request, call and result at a time."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self.tools = tools
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": RULES}]

    def add(self, request: Request, result: str | None = None) -> None:
        """Add a request, its call and its result."""
        call = {"name": request.tool, "arguments": json.dumps(request.arguments)}
        made = {"id": f"call_{len(self.messages):04d}", "type": "function", "function": call}
        self.messages += [
            {"role": "user", "content": request.words},
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": made["id"], "content": result or request.result},
        ]


def world_chars(tools: Sequence[dict[str, Any]], tokens: int) -> int:
    """Return the characters that remain for a world's listing in a session of about `tokens` tokens."""
    return tokens * _CHARS_PER_TOKEN - len(json.dumps(tools)) - len(RULES) - _SPARE


def tool(name: str, description: str, *texts: str, **others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form.

    `texts`: names of parameters that are strings; `others`: schemas of others. Those without a default are
    required.
    """
    known: dict[str, Mapping[str, Any]] = {text: {"type": "string"} for text in texts} | others
    required = [key for key, one in known.items() if "default" not in one]
    schema = {"type": "object", "properties": known, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def kind(type: str, description: str, default: int | None = None) -> dict[str, Any]:
    """Return the schema of a parameter; one with a default is optional."""
    return {"type": type, "description": description} | ({} if default is None else {"default": default})


def choice(*values: str, default: str | None = None) -> dict[str, Any]:
    """Return the schema of a parameter that is one of these strings; one with a default is optional."""
    return {"type": "string", "enum": list(values)} | ({} if default is None else {"default": default})
