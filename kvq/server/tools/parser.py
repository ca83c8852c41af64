"""Parser of tool calls: converts text to events with generators that yield while they wait for more text."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields whenever it needs more text
Schemas = Mapping[str, Mapping[str, Any]]  # schemas of the offered tools, keyed by name
_SPACE = re.compile(r"\s+")


class Event(NamedTuple):
    """Piece of text to show or, if `call` is set, a piece of the call with this number, counted from 0.

    The first event of a call has the call's id and name, and no text. The texts of all later events of the
    call concatenate to one JSON object, the arguments.
    """

    text: str
    call: int | None = None
    id: str | None = None
    name: str | None = None


class Parser:  # D324: each character is examined once; no event is revoked
    """Parser that finds the tool calls in one result while the result is generated.

    Every character is examined once, so the work is linear in the text, however it is split. Text read after
    `hold` is buffered until `release` returns it or `drop` discards it. White space before, between and after
    calls is omitted.
    """

    def __init__(
        self,
        read: Callable[["Parser"], Steps[None]],
        tools: Schemas,
        new_id: Callable[[], str],
        max_calls: int | None = None,
    ) -> None:
        """`read` parses a complete result. `tools`: offered tools. Calls after `max_calls` are omitted."""
        self.tools = tools
        self.num_calls = 0  # calls started so far, including those beyond `max_calls`
        self._steps = read(self)
        self._new_id = new_id
        self._max_calls = max_calls
        self._piece = ""
        self._at = 0
        self._is_closed = False
        self._held: list[str] | None = None
        self._events: list[Event] = []
        self._space = ""  # white space, shown only if something other than a call follows
        self._follows_text = False

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece of text, and return the resulting events. Never raises."""
        assert self._at == len(self._piece), "a piece is read to its end before the next one comes"
        self._piece, self._at = text, 0
        next(self._steps, None)
        return self._drain()

    def close(self) -> list[Event]:
        """End the text, and return the remaining events. The parser can't be used afterwards."""
        self._is_closed = True
        next(self._steps, None)
        if self._space and (self._follows_text or not self.num_calls):
            self._events.append(Event(self._space))
        return self._drain()

    def _drain(self) -> list[Event]:
        """Return the events since the last call; consecutive events of one kind are merged."""
        by_kind = groupby(self._events, lambda event: event[1:])
        events = [Event("".join(one.text for one in group), *kind) for kind, group in by_kind]
        self._events = []
        return events

    # Input

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it, or "" at the end of the text."""
        while self._at == len(self._piece) and not self._is_closed:
            yield
        return self._piece[self._at : self._at + 1]

    def take(self) -> str:
        """Consume and return the character that `peek` returned."""
        return self._read(self._at + 1)

    def run(self, pattern: re.Pattern[str]) -> str:
        """Consume the text that matches at this position in the current piece, without waiting for more."""
        match = pattern.match(self._piece, self._at)
        return "" if match is None else self._read(match.end())

    def all_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Consume all text that matches a pattern over single characters, such as `[a-z]+`."""
        found = []
        while (yield from self.peek()) and (piece := self.run(pattern)):
            found.append(piece)
        return "".join(found)

    def skip_space(self) -> Steps[None]:
        yield from self.all_of(_SPACE)

    def one_of(self, words: Sequence[str]) -> Steps[str]:
        """Consume and return one of `words` (prefix-free), or consume a partial match and return ""."""
        read = ""
        while char := (yield from self.peek()):
            read += char
            if not any(word.startswith(read) for word in words):
                return ""
            self.take()
            if read in words:
                return read
        return ""

    def word(self, word: str) -> Steps[bool]:
        """Consume a word; if another text follows, consume the characters that match, and return False."""
        return (yield from self.one_of((word,))) == word

    def hold(self) -> None:
        """Start to buffer the text that is read."""
        self._held = []

    def release(self) -> str:
        """Return the text read since `hold`, and stop buffering."""
        text = "".join(self._held or ())
        self._held = None
        return text

    def drop(self) -> None:
        """Discard the text read since `hold`, and stop buffering."""
        self._held = None

    def _read(self, end: int) -> str:
        text = self._piece[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(text)
        return text

    # Output

    @property
    def is_line_start(self) -> bool:
        """True if only white space precedes this position in its line, or since the last call."""
        return not self._follows_text or "\n" in self._space

    def show(self, text: str) -> None:
        """Emit text; trailing white space is emitted only if something other than a call follows."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._follows_text = True
            self._events.append(Event(shown))

    def start(self, name: str) -> None:
        """Emit the start event of a call."""
        self._space = ""
        self._follows_text = False
        if self._is_wanted(self.num_calls):
            self._events.append(Event("", self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append text to the arguments of the last call."""
        index = self.num_calls - 1
        if text and self._is_wanted(index):
            self._events.append(Event(text, index))

    def end_of_call(self, end: str) -> Steps[None]:
        """Consume the end marker of a call, if it follows."""
        self.hold()
        yield from self.skip_space()
        if (yield from self.word(end)):
            self.drop()
        else:
            yield from self.no_call()

    def no_call(self) -> Steps[None]:
        """Show the held text, which is not a call, or drop it if the text ends right after a call."""
        is_behind_call = self.num_calls > 0 and not self._follows_text
        if is_behind_call and not (yield from self.peek()):
            self.drop()
        else:
            self.show(self.release())

    def _is_wanted(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls
