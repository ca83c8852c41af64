"""A trial of a chat template: what it shows of turns whose words are known, and in which form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvq.errors import RequestError
from kvq.models.templates.forms import BESIDE, CALLS, TOOLS, Forms, Turns, Without

Render = Callable[[Forms, Turns, Mapping[str, Any]], str]
_CALLED, _KEY, _VALUE = "kvqcalled", "kvqgiven", "kvqvalue"
_CALL = {
    "id": "kvqcall01",  # of nine letters and digits, as Mistral's templates want them
    "type": "function",
    "function": {"name": _CALLED, "arguments": f'{{"{_KEY}": "{_VALUE}"}}'},
}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}}
_TOOL = "kvqtool"
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": "a tool", "parameters": _SCHEMA}}]
_ILL = (f"'{_KEY}'", f'\\"{_KEY}')  # Python's way of writing an object, and text that is quoted again
_WITHOUT: Sequence[Without] = ("null", "absent", "empty")


def try_out(render: Render, source: str, variables: frozenset[str] | None) -> Forms:
    """What a template shows, each in the plainest form that works.

    `render` makes a conversation's text, or raises RequestError; it is called 10 times for most templates, 30
    times at most. `source`: the template's own text; `variables`: names that it reads.
    """
    trial = _Trial(render)
    trial.forms = replace(trial.forms, variables=variables)
    if not trial.role("user", [_said("user")]):
        trial.role("user", [_said("system"), _said("user")])  # it may want a system message
    trial.role("system", [_said("system"), _said("user")])
    trial.role("assistant", [_said("user"), _said("assistant"), _said("user")])
    trial.tools()
    trial.calls()
    trial.role("tool", _called("")) or trial.role("tool", _called(""), names_results=True)
    trial.developer("developer" in source)
    return trial.forms


class _Trial:
    """One of a template; `forms` is what it has found."""

    def __init__(self, render: Render) -> None:
        self.forms = Forms(shown=frozenset())
        self._render = render
        self._tools: Sequence[Any] | None = None  # that conversations with calls are given

    def role(self, role: str, turns: Turns, **others: bool) -> bool:
        """Find how words of a role are shown; `others`: other forms that go with it."""
        tools = self._tools if role == "tool" else None
        for parts in (self.forms.parts, self.forms.parts | {role}):
            forms = replace(self.forms, parts=parts, **others)
            if _word(role) in self._text(forms, turns, tools):
                self._take(forms, role)
                return True
        return False

    def tools(self) -> None:
        """Find out whether tools are shown."""
        for turns in ([_said("user")], [_said("system"), _said("user")]):
            if _TOOL in self._text(self.forms, turns, _TOOLS):
                self._tools = _TOOLS
                return self._take(self.forms, TOOLS)

    def calls(self) -> None:
        """Find how calls are shown without text, and beside some."""
        usual = self._text(self.forms, [_said("user")], self._tools).count("None")
        forms = self._first(self._of_calls(), None, usual)
        if forms is None:
            return
        self._take(forms, CALLS)
        of_empty = (replace(self.forms, empty=form) for form in reversed(_WITHOUT))
        self.forms = self._first(of_empty, "", usual) or self.forms
        word = _word("assistant")
        for apart in (False, True):
            forms = replace(self.forms, parts_calls=apart)
            text = self._text(forms, _called(word), self._tools)
            if _VALUE in text and word in text:
                return self._take(forms, BESIDE)

    def developer(self, is_named: bool) -> None:
        """Find as whom a developer speaks: as the system, unless the template knows it by name."""
        turns = [_said("developer"), _said("user")]
        roles = ("developer", "system") if is_named else ("system", "developer")
        for role in roles:
            for parts in (self.forms.parts, self.forms.parts | {role}):
                forms = replace(self.forms, developer=role, parts=parts)
                if _word("developer") in self._text(forms, turns):
                    return self._take(forms, "developer")
        self.forms = replace(self.forms, developer=roles[0])

    def _of_calls(self) -> Iterator[Forms]:
        for joins in (False, True):
            for null in _WITHOUT:
                yield replace(self.forms, joins_arguments=joins, null=null)

    def _first(self, candidates: Iterator[Forms], content: str | None, usual: int) -> Forms | None:
        """The first that shows a call as it should, or the next best; `usual`: how often "None" is there anyway."""
        shows: list[tuple[int, int, Forms]] = []
        for forms in candidates:
            text = self._text(forms, _called(content), self._tools)
            if _KEY in text and _VALUE in text:
                ills = sum(ill in text for ill in _ILL) + (_CALLED not in text)
                shows.append((ills, text.count("None"), forms))
                if shows[-1][:2] <= (0, usual):
                    break
        return min(shows, key=lambda one: one[:2])[2] if shows else None

    def _text(self, forms: Forms, turns: Turns, tools: Sequence[Any] | None = None) -> str:
        """Of a conversation; empty if it is refused."""
        try:
            return self._render(forms, turns, {"tools": tools, "add_generation_prompt": True})
        except RequestError:
            return ""

    def _take(self, forms: Forms, shown: str) -> None:
        self.forms = replace(forms, shown=forms.shown | {shown})


def _called(content: str | None) -> Turns:
    """A conversation with a call beside some text, or none."""
    call = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
    return [_said("user"), call, _said("tool", tool_call_id=_CALL["id"])]


def _said(role: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": _word(role), **others}


def _word(role: str) -> str:
    return f"kvq{role}said"
