"""A trial of a chat template: what it shows of turns whose words are known, and in which form."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvq.errors import RequestError
from kvq.models.templates.forms import BESIDE, CALLS, TOOLS, Forms, Turns, Without

Render = Callable[[Forms, Turns, Mapping[str, Any]], str]
_CALLED, _KEY, _VALUE, _TOOL = "kvqcalled", "kvqgiven", "kvqvalue", "kvqtool"
_CALL = {
    "id": "kvqcall01",  # of nine letters and digits, as Mistral's templates want them
    "type": "function",
    "function": {"name": _CALLED, "arguments": f'{{"{_KEY}": "{_VALUE}"}}'},
}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}}
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": "a tool", "parameters": _SCHEMA}}]
_ILL = (f"'{_KEY}'", f'\\"{_KEY}')  # Python's way of writing an object, and text that is quoted again
_WITHOUT: Sequence[Without] = ("null", "absent", "empty")


def try_out(render: Render, source: str, variables: frozenset[str] | None) -> Forms:  # D287
    """Return the parts that a template shows, each in the plainest form that works.

    `render` makes a conversation's text, or raises RequestError; it is called 10 times for most templates, 26
    times at most. `source`: the template's own text; `variables`: names that it reads.
    """
    trial = _Trial(render, Forms(shown=frozenset(), variables=variables))
    system, user = _message("system"), _message("user")
    trial.role("user", [user]) or trial.role("user", [system, user])
    trial.role("system", [system, user])
    trial.role("assistant", [user, _message("assistant"), user])
    trial.tools = _TOOLS
    if not any(trial.find(TOOLS, [trial.forms], turns, _TOOL) for turns in ([user], [system, user])):
        trial.tools = None
    trial.calls([user])
    done = [*_called(""), _message("tool") | {"tool_call_id": _CALL["id"]}]
    trial.role("tool", done) or trial.role("tool", done, names_results=True)
    trial.named(done)
    trial.beside(done[2:])
    # The system is whom a developer speaks as, unless the template knows developers by name
    speakers = ("developer", "system") if "developer" in source else ("system", "developer")
    ways = [replace(trial.forms, developer=speaker) for speaker in speakers]
    if not trial.find("developer", ways, [_message("developer"), user], _word("developer")):
        return ways[0]
    return trial.forms


class _Trial:
    """Trial of one template. `forms`: found so far; `tools`: given with every conversation."""

    def __init__(self, render: Render, forms: Forms) -> None:
        self.forms = forms
        self.tools: Sequence[Any] | None = None
        self._render = render
        self._texts: dict[tuple[Forms, str, bool], str] = {}

    def find(self, what: str, ways: Iterable[Forms], turns: Turns, *words: str, **most: int) -> bool:
        """Take the first of some forms in which words are shown; `most`: how often others may be."""
        for forms in ways:
            text = self._text(forms, turns)
            are_there = all(word in text.lower() for word in words)  # templates may change their case
            if are_there and all(text.count(ill) <= n for ill, n in most.items()):
                self.forms = replace(forms, shown=self.forms.shown | {what})
                return True
        return False

    def role(self, role: str, turns: Turns, *, names_results: bool = False) -> bool:
        """Find how words of a role are shown."""
        parts = (self.forms.parts, self.forms.parts | {role})
        ways = [replace(self.forms, parts=one, names_results=names_results) for one in parts]
        return self.find(role, ways, turns, _word(role))

    def calls(self, usual: Turns) -> None:
        """Find how calls are shown without text, and beside some."""
        well = {"None": self._text(self.forms, usual).count("None"), **dict.fromkeys(_ILL, 0)}
        asked, forms = _called(None), self.forms
        ways = [replace(forms, joins_arguments=j, null=null) for j in (False, True) for null in _WITHOUT]
        for word, most in ((_CALLED, well), (_KEY, well), (_KEY, dict[str, int]())):
            if self.find(CALLS, ways, asked, word, _KEY, _VALUE, **most):
                ways = [replace(self.forms, empty=empty) for empty in reversed(_WITHOUT)]
                self.find(CALLS, ways, _called(""), _KEY, _VALUE, **well)
                return

    def named(self, done: Turns) -> None:
        """Name the function beside its result, if that can be seen."""
        forms = replace(self.forms, names_results=True)
        without, named = (self._text(one, done).lower().count(_CALLED) for one in (self.forms, forms))
        if named > without:
            self.find("tool", [forms], done, _word("tool"))

    def beside(self, results: Turns) -> None:
        """Find whether text is shown beside a call, or else before it, also in conversations that went on."""
        word, apart = _word("beside"), replace(self.forms, parts_calls=True)
        done = [*_called(word), *results]
        if not self.find(BESIDE, [self.forms], done, _VALUE, word):
            self.find(BESIDE, [apart], [*done, _message("assistant"), _message("user")], _VALUE, word)

    def _text(self, forms: Forms, turns: Turns) -> str:
        """Return the text of a conversation; empty if it is refused."""
        key = (replace(forms, shown=frozenset()), str(turns), bool(self.tools))
        if key not in self._texts:
            options = {"tools": self.tools, "add_generation_prompt": True}
            self._texts[key] = ""
            with suppress(RequestError):
                self._texts[key] = self._render(forms, turns, options)
        return self._texts[key]


def _called(content: str | None) -> Turns:
    """Return a conversation with a call beside some text, or none."""
    return [_message("user"), {"role": "assistant", "content": content, "tool_calls": [_CALL]}]


def _message(role: str) -> dict[str, Any]:
    return {"role": role, "content": _word(role)}


def _word(role: str) -> str:
    return f"kvq{role}said"
