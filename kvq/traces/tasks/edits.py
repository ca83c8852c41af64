"""Chains of edits: two settings files with the same keys, changed value by value and line by line."""

from random import Random
from typing import Any

from kvq.traces.tasks import words
from kvq.traces.tasks.talk import Request, Talk, kind, tool, world_chars

_PATHS = ("/etc/server/main.conf", "/etc/worker/main.conf")
_TEXT = kind("string", "The whole line: key = value.")
_LINE = kind("integer", "The number of the line.")
_OLD, _NEW = kind("string", "The value as it is now."), kind("string", "The value as it will be.")
_TOOLS = [
    tool("read_file", "Show a file with its lines' numbers.", "path"),
    tool("replace_text", "Replace a value in a file.", "path", old=_OLD, new=_NEW),
    tool("write_line", "Replace a whole line of a file.", "path", text=_TEXT, line=_LINE),
    tool("append_line", "Add a line at the end of a file.", "path", text=_TEXT),
]
_ROW, _EDIT = 84, 340  # characters that a key takes in both files, and those of a request with its call


def talk_of_edits(random: Random, tokens: int) -> Talk:
    """Return a session of 4 to 12 requests about two files."""
    count = random.randint(2, 10)
    edits = _Edits(random, max(8, (world_chars(_TOOLS, tokens) - _EDIT * (count - 2)) // _ROW))
    for _ in range(count):
        edits.add()
    return edits.talk


class _Edits:
    """Two files of lines "key = value", as edited so far."""

    def __init__(self, random: Random, num_keys: int) -> None:
        self.talk, self._random = Talk(_TOOLS), random
        pairs = [f"{a}.{b}".replace(" ", "_") for a in words.ITEMS for b in words.ITEMS]
        self._unused = random.sample(pairs, len(pairs))
        keys = [self._unused.pop() for _ in range(num_keys)]
        self._files = [{key: self._value() for key in keys} for _ in _PATHS]
        self._first: dict[tuple[int, str], str] = {}  # values of changed keys, by file and key
        for path, file in zip(_PATHS, self._files, strict=True):
            text = "\n".join(f"{at}: {key} = {value}" for at, (key, value) in enumerate(file.items(), 1))
            self.talk.add(Request(f"Read {path}.", "read_file", {"path": path}, text))

    def add(self) -> None:
        """Change a file by one more request."""
        kinds = [self._set, self._set, self._carry, self._write, self._append]
        self._random.choice(kinds + [self._revert] * 2 * bool(self._reverts()))()

    def _value(self) -> str:
        return f"{self._random.choice(words.FOLDERS)}-{words.code(self._random, 6)}"

    def _pick(self) -> tuple[int, str]:
        """Return a file's number, and a key that both files have."""
        keys = [key for key in self._files[0] if key in self._files[1]]
        return self._random.randrange(2), self._random.choice(keys)

    def _reverts(self) -> list[tuple[int, str]]:
        return [place for place, first in self._first.items() if self._files[place[0]][place[1]] != first]

    def _replace(self, at: int, key: str, new: str, named: str) -> None:
        file, path = self._files[at], _PATHS[at]
        arguments = {"path": path, "old": file[key], "new": new}
        self._first.setdefault((at, key), file[key])
        file[key] = new
        asked = f"In {path}, replace {named}."
        self.talk.add(Request(asked, "replace_text", arguments, self._shown(at, key)))

    def _shown(self, at: int, key: str) -> str:
        return f"{list(self._files[at]).index(key) + 1}: {key} = {self._files[at][key]}"

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
        text, lines = f"{key} = {value}", self._files[at].items()
        self._files[at] = dict((key, value) if one == former else (one, old) for one, old in lines)
        self._first.pop((at, former), None)
        shown = self._shown(at, key)
        arguments: dict[str, Any] = {"path": _PATHS[at], "text": text, "line": int(shown.partition(":")[0])}
        named = self._random.choice((f"line {arguments['line']}", f"the line of {former}"))
        asked = f"In {_PATHS[at]}, write over {named} this line: {text}"
        self.talk.add(Request(asked, "write_line", arguments, shown))

    def _append(self) -> None:
        at, key, value = self._random.randrange(2), self._unused.pop(), self._value()
        self._files[at][key] = value
        text = f"{key} = {value}"
        asked, arguments = f"Append to {_PATHS[at]} this line: {text}", {"path": _PATHS[at], "text": text}
        self.talk.add(Request(asked, "append_line", arguments, self._shown(at, key)))
