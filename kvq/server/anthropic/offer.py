"""The tools that a request offers: to the template, and to whoever reads the answer."""

from typing import Any

from kvq.server.anthropic.blocks import Marked
from kvq.server.anthropic.bodies import MessagesBody, PromptBody
from kvq.server.chat_tools import checked_offer
from kvq.server.tools import Tool
from kvq.server.tools.calling import Named, Offer, ToolCalling, ToolChoice


def template_tools(body: PromptBody, changed: Marked | None, other: str) -> list[dict[str, Any]] | None:
    """The tools that the model is told of: none if nobody would read its calls.

    Behind a tool that is `changed` stands another one, of the name `other`.
    """
    if not body.tools or body.tool_choice.type == "none":
        return None
    functions: list[dict[str, Any]] = []
    for tool in body.tools:
        functions.append(tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True))
        if tool is changed:
            functions.append({"name": other, "description": other, "parameters": {}})
    return [{"type": "function", "function": function} for function in functions]


def offer_of(body: MessagesBody, calling: ToolCalling) -> Offer | None:
    """What the request's tools ask for; None if nothing in the answer is read as a call.

    Raises:
        Problem: the tools, the choice and the output's format don't go together.
    """
    choice = body.tool_choice
    return checked_offer(
        calling,
        [Tool(name=tool.name, parameters=tool.parameters) for tool in body.tools],
        choice=_choice(body),
        parallel=not choice.disable_parallel_tool_use,
        is_formatted=body.output_config is not None and body.output_config.format is not None,
    )


def _choice(body: MessagesBody) -> ToolChoice:
    choice = body.tool_choice
    if choice.type == "any":
        return "required"
    if choice.type == "tool":
        assert choice.name is not None, "checked with the body"
        return Named(choice.name)
    return choice.type
