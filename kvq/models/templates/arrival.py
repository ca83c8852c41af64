"""Whether all of a conversation reached the text that a chat template made of it."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvq.errors import RequestError, nearest
from kvq.models.templates.forms import BESIDE, CALLS, ROLES, TOOLS, Forms, Turns

Options = Mapping[str, Any]
_CONTENT = "content"
_WORD = re.compile(r"kvqseen(\d+)z")
_MOST = 8  # things that are missed and looked at again


def check_arrival(
    render: Callable[[Turns, Options], str], turns: Turns, options: Options, text: str, forms: Forms
) -> None:
    """Raise RequestError, with what it was, if nothing of a turn, a call or a tool reached a conversation's text.

    Each gets a word of its own at its end. What's word is missed is changed alone: if that leaves the text as
    it was, nothing of it is there. Two are passed over. Text beside a call, if the template shows such at
    times: it is reasoning that was for one turn. And tools, if it shows calls of them though never any tools:
    then messages say which there are.
    """
    marks = _Marks()
    try:
        seen = set(_WORD.findall(render(*marks.put(turns, options)).casefold()))
    except RequestError:  # the template wants the very words that were given
        return
    missed = [
        (at, place)
        for at, place in enumerate(marks.places)
        if str(at) not in seen and not place.may_be_missed(forms)
    ]
    for at, place in missed[:_MOST]:
        try:
            is_there = render(*_Marks(only=at).put(turns, options)) != text
        except RequestError:
            is_there = True
        if not is_there:
            raise RequestError(f"the model's chat template shows nothing of {place.why(forms)}")


class _Place(NamedTuple):
    """Where a word was put."""

    kind: str
    number: int  # of the message or the tool, from 1
    role: str = ""
    has_calls: bool = False

    def may_be_missed(self, forms: Forms) -> bool:
        if self.kind == TOOLS:
            return forms.only_calls
        return self.kind == _CONTENT and self.has_calls and BESIDE in forms.shown

    def why(self, forms: Forms) -> str:
        """What it is, why it is not there, and what to do."""
        if self.kind == TOOLS:
            return (
                f"tool {self.number}: it has no place for it, and the model would not know of it; leave it out, "
                "or describe it in a message"
            )
        if self.kind == CALLS:
            return f"a call in message {self.number}: it has no place for it; say in the message what was called"
        known = [role for role in ROLES if role in forms.shown]
        where = f"message {self.number}, whose role is {self.role!r}: "
        if self.role in forms.shown:
            return where + "it has no place for that role there; move the message, or join it with another"
        if not known:
            return where + "it shows no words of any role"
        return where + f"it shows {', '.join(known)}{nearest(self.role, known)}"


class _Marks:
    """Puts words at the ends of what a conversation holds, or of one thing alone."""

    def __init__(self, only: int | None = None) -> None:
        self.places: list[_Place] = []
        self._only = only

    def put(self, turns: Turns, options: Options) -> tuple[Turns, Options]:
        """The conversation with the words in it; `places` tells where."""
        marked = [self._turn(turn, number) for number, turn in enumerate(turns, 1)]
        tools = [self._tool(tool, number) for number, tool in enumerate(options.get("tools") or (), 1)]
        return marked, {**options, "tools": tools} if tools else options

    def _word(self, place: _Place) -> str:
        self.places.append(place)
        at = len(self.places) - 1
        return f"kvqseen{at}z" if self._only in (None, at) else ""

    def _turn(self, turn: Mapping[str, Any], number: int) -> dict[str, Any]:
        made, content, calls = dict(turn), turn.get("content"), turn.get("tool_calls")
        place = _Place(_CONTENT, number, str(turn.get("role")), bool(calls))
        if isinstance(content, str):
            made["content"] = self._text(content, place)
        elif content:
            made["content"] = [{**part, "text": self._text(part["text"], place)} for part in content]
        if calls:
            made["tool_calls"] = [self._call(call, _Place(CALLS, number)) for call in calls]
        return made

    def _text(self, text: str, place: _Place) -> str:
        return text + self._word(place) if text.strip() else text

    def _call(self, call: Mapping[str, Any], place: _Place) -> dict[str, Any]:
        """By its arguments, or its name where there are none."""
        function, word = call["function"], self._word(place)
        arguments = function["arguments"].rstrip()
        if not word:
            return dict(call)
        if not arguments.strip("{} \n"):
            return {**call, "function": {**function, "name": function["name"] + word}}
        inside = arguments.removesuffix("}")
        more = word if inside == arguments else f', "{word}": "{word}"}}'
        return {**call, "function": {**function, "arguments": inside + more}}

    def _tool(self, tool: Mapping[str, Any], number: int) -> dict[str, Any]:
        function = tool["function"]
        return {**tool, "function": {**function, "name": function["name"] + self._word(_Place(TOOLS, number))}}
