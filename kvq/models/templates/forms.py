"""The form in which a chat template takes a conversation, and turns brought into it."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ROLES = ("system", "user", "assistant", "tool")
TOOLS, CALLS, BESIDE = "tools", "calls", "text beside calls"
Turns = Sequence[Mapping[str, Any]]
Without = Literal["empty", "null", "absent"]  # in place of a text that there is not


@dataclass(frozen=True, kw_only=True, slots=True)
class Forms:
    """Parts of a conversation that a chat template shows, and their forms; untried, all in the usual form."""

    shown: frozenset[str] = frozenset((*ROLES, TOOLS, CALLS, BESIDE))
    parts: frozenset[str] = frozenset()  # roles whose texts it shows as lists of parts alone
    developer: str = "developer"  # the role that a developer's messages are given
    null: Without = "empty"  # what a call's turn has for a content that is null
    empty: Without = "empty"  # and for one that is ""
    joins_arguments: bool = False  # it wants arguments of calls as text, not as objects
    parts_calls: bool = False  # it shows a turn's text and its calls as two turns alone
    names_results: bool = False  # it wants a function's name beside what came of a call
    variables: frozenset[str] | None = None  # that it reads; None: unknown

    @property
    def only_calls(self) -> bool:
        """True if it shows calls, and no tools that could be called: messages have to tell of them."""
        return CALLS in self.shown and TOOLS not in self.shown

    @property
    def lacking(self) -> str:
        """Return the parts that the template has no place for, in words; empty if there are none."""
        words = [f"{role} messages" for role in ROLES if role not in self.shown]
        return ", ".join(words + [what for what in (TOOLS, CALLS) if what not in self.shown])

    def messages(self, given: Turns) -> list[dict[str, Any]]:
        """Return turns as the messages that the template takes."""
        names: dict[str, str] = {}  # of the functions that were called, by the call's id
        made: list[dict[str, Any]] = []
        for turn in given:
            names |= {call.get("id", ""): call["function"]["name"] for call in turn.get("tool_calls") or ()}
            name = names.get(turn.get("tool_call_id", "")) if self.names_results else None
            made += self._made({"name": name, **turn} if name else turn)
        return made

    def _made(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the message that a turn becomes, or two."""
        rest = {name: given[name] for name in given if name not in ("role", "content", "tool_calls")}
        role, content = str(given.get("role")), given.get("content")
        role = self.developer if role == "developer" else role
        turn = {"role": role}
        texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        text: Any = "".join(texts)
        if (role if role in ROLES else "user") in self.parts:
            text = [{"type": "text", "text": one} for one in texts]
        calls = {"tool_calls": [self._call(call) for call in given.get("tool_calls") or ()]}
        if not calls["tool_calls"]:  # templates ask whether there is such a thing
            return [turn | {"content": text} | rest]
        if not any(texts):
            return [turn | _without(self.null if content is None else self.empty) | calls | rest]
        if self.parts_calls:
            return [turn | {"content": text} | rest, turn | _without(self.null) | calls]
        return [turn | {"content": text} | calls | rest]

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call with its arguments as they are wanted. What a model wrote that is no JSON stays as it is."""
        function = dict(call["function"])
        if not self.joins_arguments:
            with contextlib.suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(function["arguments"] or "{}")
        return {**call, "function": function}


def _without(form: Without) -> dict[str, Any]:
    return {} if form == "absent" else {"content": None if form == "null" else ""}
