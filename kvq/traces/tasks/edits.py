"""Chains of edits: two settings files with the same keys, changed value by value and line by line."""

from random import Random

from kvq.traces.tasks import words
from kvq.traces.tasks.talk import Request, Talk, kind, tool, world_chars

_PATHS = ("/etc/server/main.conf", "/etc/worker/main.conf")
_LINE = kind("integer", "The number of the line.")
_TOOLS = [
    tool("read_file", "Show a file with its lines' numbers.", "path"),
    tool("replace_text", "Replace an old value in a file by a new one.", "path", "old", "new"),
    tool("write_line", "Replace a whole line of a file.", "path", "text", line=_LINE),
    tool("append_line", "Add a line at the end of a file.", "path", "text"),
]
_ROW = 130  # characters that a key takes in both files, with its remark


def talk_of_edits(random: Random, tokens: int) -> Talk:
    """Return a session of 4 to 12 requests about two files."""
    edits = _Edits(random, max(8, world_chars(_TOOLS, tokens) // _ROW))
    for _ in range(random.randint(2, 10)):
        edits.add()
    return edits.talk


class _Edits:
    """Two files of lines "key = value", as edited so far."""

    def __init__(self, random: Random, num_keys: int) -> None:
        self.talk, self._random = Talk(_TOOLS), random
        self._serials = random.sample(range(100, 1000 + 2 * num_keys), 50 + num_keys)  # keys differ in them
        keys = [self._key() for _ in range(num_keys)]
        self._files = [{key: self._value() for key in keys} for _ in _PATHS]
        self._old: list[tuple[int, str, str]] = []  # files, keys and first values of what was changed
        for path, file in zip(_PATHS, self._files, strict=True):
            text = "\n".join(f"{at}: {key} = {value}" for at, (key, value) in enumerate(file.items(), 1))
            self.talk.add(Request(f"Read {path}.", "read_file", {"path": path}, text, "Here it is."))

    def add(self) -> None:
        """Change a file by one more request."""
        kinds = [self._set, self._set, self._carry, self._write, self._append]
        self._random.choice(kinds + [self._revert] * 2 * bool(self._old))()

    def _key(self) -> str:
        return f"{self._random.choice(words.ITEMS).replace(' ', '_')}_{self._serials.pop()}"

    def _value(self) -> str:
        return f"{self._random.choice(words.FOLDERS)}-{words.code(self._random, 6)}"

    def _pick(self) -> tuple[int, str]:
        """Return a file, and a key that both files have."""
        keys = [key for key in self._files[0] if key in self._files[1]]
        return self._random.randrange(2), self._random.choice(keys)

    def _replace(self, at: int, key: str, new: str, named: str) -> None:
        file, path = self._files[at], _PATHS[at]
        arguments = {"path": path, "old": file[key], "new": new}
        file[key] = new
        asked = f"In {path}, replace the value of {key} with {named}."
        self.talk.add(Request(asked, "replace_text", arguments, f"{self._number(at, key)}: {key} = {new}"))

    def _number(self, at: int, key: str) -> int:
        return list(self._files[at]).index(key) + 1

    def _set(self) -> None:
        (at, key), value = self._pick(), self._value()
        self._old.append((at, key, self._files[at][key]))
        self._replace(at, key, value, value)

    def _carry(self) -> None:
        at, key = self._pick()
        if self._files[at][key] != self._files[1 - at][key]:
            self._replace(at, key, self._files[1 - at][key], f"the value that it has in {_PATHS[1 - at]}")

    def _revert(self) -> None:
        at, key, old = self._old.pop(self._random.randrange(len(self._old)))
        self._replace(at, key, old, "the value that it had at first")

    def _write(self) -> None:
        at, key = self._pick()
        line, text = self._number(at, key), f"{self._key()} = {self._value()}"
        ...
