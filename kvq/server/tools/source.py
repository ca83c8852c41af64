"""Text source: text that comes in pieces, read by generators that wait for more of it."""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text
_SPACE = re.compile(r"\s+")


class Source:
    """Text in pieces. Every character is looked at once: work is linear in the text, however it is cut.

    Text read after `hold` is kept until `release` returns it or `drop` forgets it.
    """

    def __init__(self) -> None:
        self._piece = ""
        self._at = 0
        self._is_closed = False
        self._held: list[str] | None = None

    def add(self, text: str) -> None:
        """Add the next piece, after the one before was read to its end."""
        assert self._at == len(self._piece), "a piece is read to its end before the next one comes"
        self._piece, self._at = text, 0

    def close(self) -> None:
        """Note that no more pieces come."""
        self._is_closed = True

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._piece) and not self._is_closed:
            yield
        return self._piece[self._at : self._at + 1]

    def take(self) -> str:
        """Read the character that was peeked at."""
        return self._read(self._at + 1)

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read the text that matches here in this piece, without waiting for the next one."""
        match = pattern.match(self._piece, self._at)
        return "" if match is None else self._read(match.end())

    def all_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read all that matches a pattern of single characters, such as `[a-z]+`."""
        found = []
        while (yield from self.peek()) and (piece := self.run(pattern)):
            found.append(piece)
        return "".join(found)

    def skip_space(self) -> Steps[None]:
        """Read white space."""
        yield from self.all_of(_SPACE)

    def one_of(self, words: Sequence[str]) -> Steps[str]:
        """Read one of some words, none a prefix of another. "" if none comes: the part that fits is read."""
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
        """Read a word. False if it does not come: characters that fit are read."""
        return (yield from self.one_of((word,))) == word

    def hold(self) -> None:
        """Keep the text that is read from here on."""
        self._held = []

    def release(self) -> str:
        """Return the text read since `hold`, and keep no more."""
        text = "".join(self._held or ())
        self._held = None
        return text

    def drop(self) -> None:
        """Forget the text read since `hold`, and keep no more."""
        self._held = None

    def _read(self, end: int) -> str:
        text = self._piece[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(text)
        return text
