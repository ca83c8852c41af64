"""A part's file: what has been measured so far, whole at any time."""

import json
import time
from pathlib import Path
from typing import Any

from kvq import fileio

State = dict[str, Any]


def read(path: Path) -> State | None:
    """Return the content of a part's file; None if the part has not begun."""
    if not path.is_file():
        return None
    state: State = json.loads(path.read_text(encoding="utf-8"))
    return state


def write(path: Path, state: State) -> None:
    """Replace a part's file.

    Raises:
        ValueError: a NaN or an infinity is among the figures; the file is what it was.
    """
    fileio.write_text(path, json.dumps(state, indent=1, allow_nan=False) + "\n")


class Record:
    """A part's file as its own process writes it: after every case, and before one that may not end."""

    def __init__(self, path: Path, header: State) -> None:
        """`header`: an envelope without rows, for a file that begins."""
        self._path = path
        self._begin = time.monotonic()
        empty = {"status": "running", "seconds": 0.0, "cases": 0, "done": [], "failed": {}, "running": None}
        self._state = read(path) or header | empty | {"rows": []}
        self._before = self._state["seconds"]
        self._write(self._state | {"status": "running"})

    def is_done(self, name: str) -> bool:
        """True if a case has given its rows."""
        return name in self._state["done"]

    def has_failed(self, name: str) -> bool:
        """True if a case was tried in vain."""
        return name in self._state["failed"]

    def begin(self, name: str, limit_s: float) -> None:
        """Note what runs now, for whoever finds the process dead, or ends it."""
        running = {"case": name, "since": time.time(), "limit_s": limit_s}
        count = max(self._state["cases"], len(self._state["done"]) + len(self._state["failed"]) + 1)
        self._write(self._state | {"running": running, "cases": count})

    def done(self, name: str, rows: list[State]) -> None:
        """Add a case's rows.

        Raises:
            ValueError: they hold a NaN or an infinity.
        """
        added = self._state["rows"] + [{"case": name, **row} for row in rows]
        self._write(self._state | {"rows": added, "done": [*self._state["done"], name], "running": None})

    def fail(self, name: str, reason: str) -> None:
        """Note why a case gave nothing."""
        self._write(failed(self._state, name, reason))

    def end(self) -> None:
        """Note that nothing is left to do."""
        self._write(self._state | {"status": "ended"})

    def _write(self, state: State) -> None:
        state = state | {"seconds": round(self._before + time.monotonic() - self._begin, 1)}
        write(self._path, state)
        self._state = state


def failed(state: State, name: str, reason: str) -> State:
    """The state after a case gave nothing."""
    return state | {"failed": state["failed"] | {name: reason}, "running": None}
