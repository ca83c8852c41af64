"""Parser output: the events found in a model's text."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from uuid import uuid4

from kvq.server.tools.source import Source, Steps


@dataclass(frozen=True, slots=True)
class Text:
    """Text to show."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a call, the `index`-th of this answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; all pieces join to the text of one JSON object."""

    index: int
    text: str


Event = Text | CallStart | CallArguments


def call_id() -> str:
    """Return a new id of a call, as OpenAI writes them."""
    return f"call_{uuid4().hex[:24]}"


class Output:
    """Events since the last `drain`. White space before, between and after calls is left out."""

    def __init__(self, new_id: Callable[[], str], max_calls: int | None) -> None:
        """Calls beyond the first `max_calls` are left out."""
        self._new_id = new_id
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._space = ""  # read, and not shown until something other than a call follows
        self._follows_text = False
        self.num_calls = 0

    @property
    def is_line_start(self) -> bool:
        """True if only white space, if anything, stands between here and a line's start or a call."""
        return not self._follows_text or "\n" in self._space

    @property
    def is_behind_call(self) -> bool:
        """True if a call came last."""
        return self.num_calls > 0 and not self._follows_text

    def text(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._follows_text = True
            self._events.append(Text(shown))

    def start(self, name: str) -> None:
        self._space = ""
        self._follows_text = False
        if self._is_wanted(self.num_calls):
            self._events.append(CallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        index = self.num_calls - 1
        if text and self._is_wanted(index):
            self._events.append(CallArguments(index, text))

    def finish(self) -> None:
        """End the output: show the white space at the end of a text."""
        if self._space and (self._follows_text or not self.num_calls):
            self._events.append(Text(self._space))
        self._space = ""

    def drain(self) -> list[Event]:
        """Return the events since the last time; neighbours of one kind are one event."""
        drained: list[Event] = []
        by_call = groupby(self._events, lambda one: (type(one), -1 if isinstance(one, Text) else one.index))
        for (kind, index), group in by_call:
            events = list(group)
            if kind is CallStart:
                drained += events
                continue
            text = "".join(event.text for event in events if not isinstance(event, CallStart))
            drained.append(Text(text) if kind is Text else CallArguments(index, text))
        self._events = []
        return drained

    def _is_wanted(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls


def end_of_call(source: Source, output: Output, end: str) -> Steps[None]:
    """Read the marker behind a call, if it comes."""
    source.hold()
    yield from source.skip_space()
    if (yield from source.word(end)):
        source.drop()
    else:
        yield from no_call(source, output)


def no_call(source: Source, output: Output) -> Steps[None]:
    """Show held text, which was no call. Behind a call, the rest of an answer that breaks off is left out."""
    if output.is_behind_call and not (yield from source.peek()):
        source.drop()
    else:
        output.text(source.release())
