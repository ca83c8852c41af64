"""Arrival check: every part of a conversation must appear in the text that a chat template renders."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvq.errors import RequestError, nearest
from kvq.models.templates.forms import BESIDE, CALLS, ROLES, TOOLS, Forms, Turns

Options = Mapping[str, Any]
_TEXT = "text"
_Place = tuple[str, int, Mapping[str, Any]]  # kind of the marked part, its number from 1, its turn or tool
_WORD = re.compile(r"kvqseen(\d+)z", re.IGNORECASE)
_MOST = 8  # missing parts that are checked again


def check_arrival(  # D288: rendered again with markers, so that nothing gets lost
    render: Callable[[Turns, Options], str], turns: Turns, options: Options, text: str, forms: Forms
) -> dict[int, int]:
    """Raise RequestError if a conversation's rendered text omits some turn, call or tool entirely.

    Each part is marked with a unique word. If a word is missing from the text, a second rendering marks that
    part alone; if the text then does not change, the template omits the part.

    Returns the index in the text where each message's own text ends, by the message's number from 1.
    """
    lost: list[_Place] = []
    ends: dict[int, int] = {}
    with suppress(RequestError):  # the template then accepts only the original words
        marked, marked_options, places = _marked(turns, options)
        words, seen, added = {str(at): place for at, place in enumerate(places)}, set[str](), 0
        for found in _WORD.finditer(render(marked, marked_options)):
            if found[1] in words:
                seen.add(found[1])
                what, number, _ = words[found[1]]
                if what == _TEXT:
                    ends[number] = found.start() - added
                added += len(found[0])
        missed = [at for at, place in enumerate(places) if str(at) not in seen and _matters(place, forms)]
        lost = [places[at] for at in missed[:_MOST] if render(*_marked(turns, options, only=at)[:2]) == text]
    if lost:
        raise RequestError(f"the model's chat template shows nothing of {_missing(lost[0], forms)}")
    return ends


def _matters(place: _Place, forms: Forms) -> bool:
    """Return False for text next to calls if the template shows it, and for tools if it shows only calls."""
    what, _, of = place
    if what == _TEXT and of.get("tool_calls"):
        return BESIDE not in forms.shown
    return not (what == TOOLS and forms.only_calls)


def _missing(place: _Place, forms: Forms) -> str:
    """Return a message that names the missing part, the reason and the remedy."""
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
    """Return a conversation with marker words in all its parts, or in part `only` alone, and the parts."""
    places: list[_Place] = []

    def word(*place: Any) -> str:
        places.append(place)
        return f"kvqseen{len(places) - 1}z" if only in (None, len(places) - 1) else ""

    def with_mark(text: str, *place: Any) -> str:
        mark = word(_TEXT, *place) if text.strip() else ""
        return text + mark if only is None else mark + text + mark  # a template may truncate it

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
    """Return a tool call with a marker in its arguments, or in its name if there are no arguments."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    inside, brace, after = (
        arguments.rpartition("}") if arguments.rstrip().endswith("}") else (arguments, "", "")
    )
    if not inside.strip("{ \n"):
        name += word
    elif word:
        arguments = inside + (f', "{word}": "{word}"}}' if brace else word) + after
    return {**call, "function": {**call["function"], "name": name, "arguments": arguments}}
