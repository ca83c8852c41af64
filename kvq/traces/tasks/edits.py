"""Chains of edits: two settings files with the same keys, changed value by value and line by line."""

from random import Random
from typing import Any

from kvq.traces.tasks.worlds import WORDS, code, pick, request

_PATHS = ("/etc/server/main.conf", "/etc/worker/main.conf")
_ROW, _EDIT = 84, 340  # characters that a key takes in both files, and those of a request with its call


def edits_messages(random: Random, chars: int) -> list[dict[str, Any]]:
    """Return 4 to 12 requests about two files, with their calls and results."""
    count = random.randint(2, 10)
    edits = _Edits(random, max(8, (chars - _EDIT * (count - 2)) // _ROW))
    for _ in range(count):
        edits.add()
    return edits.messages


class _Edits:
    """Two files of lines "key = value", as edited so far."""

    def __init__(self, random: Random, num_keys: int) -> None:
        self.messages: list[dict[str, Any]] = []
        self._random = random
        pairs = [f"{a}.{b}".replace(" ", "_") for a in WORDS["items"] for b in WORDS["items"]]
        self._unused = random.sample(pairs, len(pairs))
        keys = [self._unused.pop() for _ in range(num_keys)]
        self._files = [{key: self._value() for key in keys} for _ in _PATHS]
        self._first: dict[tuple[int, str], str] = {}  # values of changed keys, by file and key
        for at, path in enumerate(_PATHS):
            self._ask(at, f"Read {path}.", "read_file", {}, "\n".join(self._lines(at)))

    def add(self) -> None:
        """Change a file by one more request."""
        kinds = [self._set, self._set, self._carry, self._write, self._append]
        self._random.choice(kinds + [self._revert] * 2 * bool(self._reverts()))()

    def _ask(self, at: int, words: str, tool: str, arguments: dict[str, Any], result: str) -> None:
        arguments = {"path": _PATHS[at], **arguments}
        self.messages += request(len(self.messages) + 1, words, tool, arguments, result)

    def _lines(self, at: int) -> list[str]:
        return [f"{line}: {key} = {value}" for line, (key, value) in enumerate(self._files[at].items(), 1)]

    def _line(self, at: int, key: str) -> str:
        return self._lines(at)[list(self._files[at]).index(key)]

    def _value(self) -> str:
        return f"{pick(self._random, 'folders')}-{code(self._random, 6)}"

    def _pick(self) -> tuple[int, str]:
        """Return a file's number, and a key that both files have."""
        keys = [key for key in self._files[0] if key in self._files[1]]
        return self._random.randrange(2), self._random.choice(keys)

    def _reverts(self) -> list[tuple[int, str]]:
        return [(at, key) for (at, key), first in self._first.items() if self._files[at][key] != first]

    def _replace(self, at: int, key: str, new: str, named: str) -> None:
        arguments = {"old": self._files[at][key], "new": new}
        self._first.setdefault((at, key), self._files[at][key])
        self._files[at][key] = new
        asked = f"In {_PATHS[at]}, replace {named}."
        self._ask(at, asked, "replace_text", arguments, self._line(at, key))

    def _set(self) -> None:
        (at, key), value = self._pick(), self._value()
        old = self._random.choice((f"the text {self._files[at][key]}", f"the value of {key}"))
        self._replace(at, key, value, f"{old} with {value}")

    def _carry(self) -> None:
        at, key = self._pick()
        value = self._files[1 - at][key]
        if value == self._files[at][key]:
            self._set()
        else:
            self._replace(at, key, value, f"the value of {key} with its value in {_PATHS[1 - at]}")

    def _revert(self) -> None:
        at, key = self._random.choice(self._reverts())
        self._replace(at, key, self._first[at, key], f"the value of {key} with its first value")

    def _write(self) -> None:
        (at, former), key, value = self._pick(), self._unused.pop(), self._value()
        line, lines = list(self._files[at]).index(former) + 1, self._files[at].items()
        self._files[at] = dict((key, value) if one == former else (one, old) for one, old in lines)
        self._first.pop((at, former), None)
        text = f"{key} = {value}"
        named = self._random.choice((f"line {line}", f"the line of {former}"))
        asked = f"In {_PATHS[at]}, write over {named} this line: {text}"
        self._ask(at, asked, "write_line", {"text": text, "line": line}, self._line(at, key))

    def _append(self) -> None:
        at, key, value = self._random.randrange(2), self._unused.pop(), self._value()
        self._files[at][key] = value
        text = f"{key} = {value}"
        asked = f"Append to {_PATHS[at]} this line: {text}"
        self._ask(at, asked, "append_line", {"text": text}, self._line(at, key))
