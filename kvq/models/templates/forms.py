"""The form of conversation that a chat template accepts, and the conversion of turns to this form.

The form is found by trial: turns with known words are rendered, and the text is searched for the words.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvq.errors import RequestError

ROLES = ("system", "user", "assistant", "tool")
TOOLS, CALLS, BESIDE = "tools", "calls", "text beside calls"
Turns = Sequence[Mapping[str, Any]]
Without = Literal["empty", "null", "absent"]  # the content of a turn without text


@dataclass(frozen=True, kw_only=True, slots=True)
class Forms:
    """Parts of a conversation that a chat template shows, and their forms; defaults fit most templates."""

    shown: frozenset[str] = frozenset((*ROLES, TOOLS, CALLS, BESIDE))
    parts: frozenset[str] = frozenset()  # roles whose texts it shows only as lists of parts
    developer: str = "developer"  # the role for developer messages
    null: Without = "empty"  # the form of a call turn's content if it is null
    empty: Without = "empty"  # the form if it is ""
    joins_arguments: bool = False  # it takes call arguments as text, not as objects
    parts_calls: bool = False  # it shows a turn's text and its calls only as two turns
    names_results: bool = False  # it needs the function's name in a call's result
    variables: frozenset[str] | None = None  # variables that it reads; None: unknown

    @property
    def only_calls(self) -> bool:
        """True if the template shows calls but no tools, so that messages must describe the tools."""
        return CALLS in self.shown and TOOLS not in self.shown

    @property
    def lacking(self) -> str:
        """Description of the parts that the template can't show; empty if there are none."""
        words = [f"{role} messages" for role in ROLES if role not in self.shown]
        return ", ".join(words + [what for what in (TOOLS, CALLS) if what not in self.shown])

    def messages(self, given: Turns) -> list[dict[str, Any]]:
        """Return turns as messages in the form that the template accepts."""
        names: dict[str, str] = {}  # names of called functions, by the call's id
        made: list[dict[str, Any]] = []
        for turn in given:
            names |= {call.get("id", ""): call["function"]["name"] for call in turn.get("tool_calls") or ()}
            name = names.get(turn.get("tool_call_id", "")) if self.names_results else None
            made += self._made({"name": name, **turn} if name else turn)
        return made

    def _made(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the one or two messages for a turn."""
        rest = {name: given[name] for name in given if name not in ("role", "content", "tool_calls")}
        role, content = str(given.get("role")), given.get("content")
        role = self.developer if role == "developer" else role
        turn = {"role": role}
        texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        text: Any = "".join(texts)
        if (role if role in ROLES else "user") in self.parts:
            text = [{"type": "text", "text": one} for one in texts]
        calls = {"tool_calls": [self._call(call) for call in given.get("tool_calls") or ()]}
        if not calls["tool_calls"]:  # templates test whether the key exists
            return [turn | {"content": text} | rest]
        if not any(texts):
            return [turn | _without(self.null if content is None else self.empty) | calls | rest]
        if self.parts_calls:
            return [turn | {"content": text} | rest, turn | _without(self.null) | calls]
        return [turn | {"content": text} | calls | rest]

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call with arguments in the template's form; invalid JSON from a model is kept as text."""
        function = dict(call["function"])
        if not self.joins_arguments:
            with suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(function["arguments"] or "{}")
        return {**call, "function": function}


def _without(form: Without) -> dict[str, Any]:
    return {} if form == "absent" else {"content": None if form == "null" else ""}


Render = Callable[[Forms, Turns, Mapping[str, Any]], str]
_CALLED, _KEY, _VALUE, _TOOL = "kvqcalled", "kvqgiven", "kvqvalue", "kvqtool"
_CALL = {
    "id": "kvqcall01",  # nine letters and digits, as Mistral's templates require
    "type": "function",
    "function": {"name": _CALLED, "arguments": f'{{"{_KEY}": "{_VALUE}"}}'},
}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}}
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": "a tool", "parameters": _SCHEMA}}]
_ILL = (f"'{_KEY}'", f'\\"{_KEY}')  # signs of a wrong form: a Python repr, and JSON quoted twice
_WITHOUT: Sequence[Without] = ("null", "absent", "empty")


def try_out(render: Render, source: str, variables: frozenset[str] | None) -> Forms:  # D287
    """Return the parts that a template shows, each in the simplest form that works.

    `render` renders a conversation or raises RequestError; it is called 10 times for most templates and at
    most 26 times. `source`: the template's source; `variables`: names that the template reads.
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
    # Developer messages take the system role unless the template knows the developer role
    speakers = ("developer", "system") if "developer" in source else ("system", "developer")
    ways = [replace(trial.forms, developer=speaker) for speaker in speakers]
    if not trial.find("developer", ways, [_message("developer"), user], _word("developer")):
        return ways[0]
    return trial.forms


class _Trial:
    """Trial of one template. `forms`: the forms found so far; `tools`: passed with every conversation."""

    def __init__(self, render: Render, forms: Forms) -> None:
        self.forms = forms
        self.tools: Sequence[Any] | None = None
        self._render = render
        self._texts: dict[tuple[Forms, str, bool], str] = {}

    def find(self, what: str, ways: Iterable[Forms], turns: Turns, *words: str, **most: int) -> bool:
        """Keep the first form that shows the words; `most`: maximum counts of other strings."""
        for forms in ways:
            text = self._text(forms, turns)
            are_there = all(word in text.lower() for word in words)  # templates may change their case
            if are_there and all(text.count(ill) <= n for ill, n in most.items()):
                self.forms = replace(forms, shown=self.forms.shown | {what})
                return True
        return False

    def role(self, role: str, turns: Turns, *, names_results: bool = False) -> bool:
        """Find the form in which a role's messages are shown."""
        parts = (self.forms.parts, self.forms.parts | {role})
        ways = [replace(self.forms, parts=one, names_results=names_results) for one in parts]
        return self.find(role, ways, turns, _word(role))

    def calls(self, usual: Turns) -> None:
        """Find the form in which calls without text are shown, for both null and empty content."""
        well = {"None": self._text(self.forms, usual).count("None"), **dict.fromkeys(_ILL, 0)}
        asked, forms = _called(None), self.forms
        ways = [replace(forms, joins_arguments=j, null=null) for j in (False, True) for null in _WITHOUT]
        for word, most in ((_CALLED, well), (_KEY, well), (_KEY, dict[str, int]())):
            if self.find(CALLS, ways, asked, word, _KEY, _VALUE, **most):
                ways = [replace(self.forms, empty=empty) for empty in reversed(_WITHOUT)]
                self.find(CALLS, ways, _called(""), _KEY, _VALUE, **well)
                return

    def named(self, done: Turns) -> None:
        """Add the function's name to call results if the template shows the name."""
        forms = replace(self.forms, names_results=True)
        without, named = (self._text(one, done).lower().count(_CALLED) for one in (self.forms, forms))
        if named > without:
            self.find("tool", [forms], done, _word("tool"))

    def beside(self, results: Turns) -> None:
        """Find out whether text is shown with a call or as a separate turn before the call."""
        word, apart = _word("beside"), replace(self.forms, parts_calls=True)
        done = [*_called(word), *results]
        if not self.find(BESIDE, [self.forms], done, _VALUE, word):
            self.find(BESIDE, [apart], [*done, _message("assistant"), _message("user")], _VALUE, word)

    def _text(self, forms: Forms, turns: Turns) -> str:
        """Return the text of a conversation, or "" if the template rejects it."""
        key = (replace(forms, shown=frozenset()), str(turns), bool(self.tools))
        if key not in self._texts:
            options = {"tools": self.tools, "add_generation_prompt": True}
            self._texts[key] = ""
            with suppress(RequestError):
                self._texts[key] = self._render(forms, turns, options)
        return self._texts[key]


def _called(content: str | None) -> Turns:
    """Return a conversation with a tool call in a turn whose content is `content`."""
    return [_message("user"), {"role": "assistant", "content": content, "tool_calls": [_CALL]}]


def _message(role: str) -> dict[str, Any]:
    return {"role": role, "content": _word(role)}


def _word(role: str) -> str:
    return f"kvq{role}said"
