"""Tool calls in OpenAI's chats: what a request offers, and its answer's messages."""

from collections.abc import Sequence
from typing import Any

from kvq.engine.outputs import Piece
from kvq.server.answers import reason_of
from kvq.server.bodies import ChatBody
from kvq.server.problems import Problem
from kvq.server.tool_bodies import ToolChoiceBody
from kvq.server.tools import CallArguments, CallStart, Event, Parser, Text, Tool
from kvq.server.tools.calling import Named, Offer, ToolCalling, ToolChoice


def offer_of(body: ChatBody, calling: ToolCalling) -> Offer | None:
    """What the request's tools ask for; None if nothing in the answer is read as a call.

    Raises:
        Problem: the tools, the choice and the response format don't go together.
    """
    functions = [tool.function for tool in body.tools or ()]
    return checked_offer(
        calling,
        [Tool(name=function.name, parameters=function.parameters or {}) for function in functions],
        choice=_choice(body),
        parallel=body.parallel_tool_calls,
        is_formatted=body.response_format is not None and body.response_format.type != "text",
    )


def checked_offer(
    calling: ToolCalling, tools: Sequence[Tool], *, choice: ToolChoice, parallel: bool, is_formatted: bool
) -> Offer | None:
    """What tools ask for, in whatever protocol; None if nothing in the answer is read as a call.

    `is_formatted`: the answer has to be something else, too.

    Raises:
        Problem: the tools, the choice and the format don't go together.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise Problem(400, "two tools have the same name", param="tools")
    if not tools:
        if choice not in ("none", "auto"):
            raise Problem(400, "tool_choice needs tools", param="tool_choice")
        return None
    if isinstance(choice, Named) and choice.name not in names:
        raise Problem(400, f"tool_choice names no tool of this request: {choice.name}", param="tool_choice")
    if choice != "none" and is_formatted:
        raise Problem(
            400,
            "an output format (response_format) and calls exclude each other: leave out the tools, or use "
            'tool_choice "none"',
            param="response_format",
        )
    return calling.offer(tools, choice=choice, parallel=parallel)


def template_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools that the model is told of: none if nobody would read its calls."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


class Reading:
    """One result's text, read as it comes."""

    def __init__(self, parser: Parser | None) -> None:
        """Without a parser all is content."""
        self._parser = parser

    def message(self, whole: Piece) -> dict[str, Any]:
        """A whole result."""
        added = self.delta(whole)
        message = {"role": "assistant", "refusal": None, "content": added.get("content", "")}
        if calls := added.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return message

    def delta(self, delta: Piece) -> dict[str, Any]:
        """What a step adds to a result; may be nothing."""
        if self._parser is None:
            return {"content": delta.text}
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.close()
        added: dict[str, Any] = {}
        if content := "".join(event.text for event in events if isinstance(event, Text)):
            added["content"] = content
        if calls := _call_deltas(events):
            added["tool_calls"] = calls
        return added

    def reason(self, piece: Piece) -> str | None:
        """Why the result ended, as OpenAI says it; last of all that is asked about a piece."""
        reason = reason_of(piece)
        has_calls = self._parser is not None and self._parser.num_calls
        return "tool_calls" if has_calls and reason == "stop" else reason


def _choice(body: ChatBody) -> ToolChoice:
    choice = body.tool_choice
    return Named(choice.function.name) if isinstance(choice, ToolChoiceBody) else choice or "auto"


def _call_deltas(events: Sequence[Event]) -> list[dict[str, Any]]:
    """One for each call that something was added to: clients know no more than one of an index in a chunk."""
    deltas: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            deltas[event.index] = {
                "index": event.index,
                "id": event.id,
                "type": "function",
                "function": function,
            }
        elif isinstance(event, CallArguments):
            delta = deltas.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            delta["function"]["arguments"] += event.text
    return list(deltas.values())
