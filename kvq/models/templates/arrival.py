"""Arrival check: every part of a conversation has to reach the text that a chat template makes of it."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvq.errors import RequestError, nearest
from kvq.models.templates.forms import BESIDE, CALLS, ROLES, TOOLS, Forms, Turns

Options = Mapping[str, Any]
_TEXT = "text"
_Place = tuple[str, int, Mapping[str, Any]]  # what a word was put to, its number from 1, its turn or tool
_WORD = re.compile(r"kvqseen(\d+)z")
_MOST = 8  # things that are missed and looked at again


def check_arrival(  # D288: rendered again with markers: nothing gets lost
    render: Callable[[Turns, Options], str], turns: Turns, options: Options, text: str, forms: Forms
) -> None:
    """Raise RequestError if nothing of a turn, a call or a tool reached a conversation's text.

    Each gets a word of its own. If that is missed, it is changed alone: nothing of it is there if the text
    stays as it was.
    """
    lost: list[_Place] = []
    with suppress(RequestError):  # then the template wants the very words that were given
        marked, marked_options, places = _marked(turns, options)
        seen = set(_WORD.findall(render(marked, marked_options).casefold()))
        missed = [at for at, place in enumerate(places) if str(at) not in seen and _matters(place, forms)]
        lost = [places[at] for at in missed[:_MOST] if render(*_marked(turns, options, only=at)[:2]) == text]
    if lost:
        raise RequestError(f"the model's chat template shows nothing of {_missing(lost[0], forms)}")


def _matters(place: _Place, forms: Forms) -> bool:
    """False for text beside calls if some is shown: it was for one turn; for tools if only calls are."""
    what, _, of = place
    if what == _TEXT and of.get("tool_calls"):
        return BESIDE not in forms.shown
    return not (what == TOOLS and forms.only_calls)


def _missing(place: _Place, forms: Forms) -> str:
    """Return what is missing, the reason, and what to do."""
    what, number, of = place
    if what == TOOLS:
        return f"tool {number}, so the model would not know of it; leave it out, or describe it in a message"
    if what == CALLS:
        return f"a call in message {number}; say in the message's content what was called"
    role, known = str(of.get("role")), [role for role in ROLES if role in forms.shown]
    if role in known:
        return f"message {number} of role {role!r}, there; move it, or join it with another message"
    others = ", ".join(known) or "no role at all"
    return f"message {number}, whose role is {role!r}; it knows {others}{nearest(role, known)}"


def _marked(turns: Turns, options: Options, only: int | None = None) -> tuple[Turns, Options, list[_Place]]:
    """A conversation with words at the ends of what it holds, or of one thing alone, and where they are."""
    places: list[_Place] = []

    def word(*place: Any) -> str:
        places.append(place)
        return f"kvqseen{len(places) - 1}z" if only in (None, len(places) - 1) else ""

    def with_mark(text: str, *place: Any) -> str:
        mark = word(_TEXT, *place) if text.strip() else ""
        return text + mark if only is None else mark + text + mark  # a template may cut it

    made = []
    for number, turn in enumerate(turns, 1):
        marked, content = dict(turn), turn.get("content")
        if isinstance(content, str):
            marked["content"] = with_mark(content, number, turn)
        elif content:
            marked["content"] = [{**part, "text": with_mark(part["text"], number, turn)} for part in content]
        if calls := turn.get("tool_calls"):
            marked["tool_calls"] = [_marked_call(call, word(CALLS, number, turn)) for call in calls]
        made.append(marked)
    tools = []
    for number, tool in enumerate(options.get("tools") or (), 1):
        name = tool["function"]["name"] + word(TOOLS, number, tool)
        tools.append({**tool, "function": tool["function"] | {"name": name}})
    return made, {**options, "tools": tools or None}, places


def _marked_call(call: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return a tool call marked by its arguments, or by its name if it has none."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    inside, brace, after = (
        arguments.rpartition("}") if arguments.rstrip().endswith("}") else (arguments, "", "")
    )
    if not inside.strip("{ \n"):
        name += word
    elif word:
        arguments = inside + (f', "{word}": "{word}"}}' if brace else word) + after
    return {**call, "function": {**call["function"], "name": name, "arguments": arguments}}
