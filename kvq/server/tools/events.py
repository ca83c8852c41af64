"""What a parser finds in a model's text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text to show."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: the `index`-th of this answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; all pieces join to the text of one JSON object."""

    index: int
    text: str


Event = Text | CallStart | CallArguments
