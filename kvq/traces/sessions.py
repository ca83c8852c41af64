"""A session of an agent: a conversation with tools from a log, in the form that chat templates take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedSession:
    """One conversation. Its assistant's turns are what is measured."""

    name: str  # as its log names it, or its place there, such as "line 7"
    messages: Sequence[dict[str, Any]]  # in OpenAI's form; arguments of calls are JSON texts
    tools: Sequence[dict[str, Any]] = ()  # in OpenAI's form
    is_checked: bool = False  # the assistant's calls are the only right ones, so others are mistakes

    def answers(self) -> Iterator[int]:
        """Yield the indices of the assistant's messages that answer another message."""
        for at, message in enumerate(self.messages):
            if at and message["role"] == "assistant":
                yield at


@dataclass(kw_only=True, slots=True, eq=False)
class Log:
    """Sessions of a file, and its lines that hold none."""

    sessions: list[RecordedSession] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)  # number of the line, from 1, and why
