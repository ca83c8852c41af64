"""A file of finished parts of a long measurement, with which an interrupted one goes on."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError

_VERSION = 1


class Finished:
    """Finished parts by name, each a JSON value. The file is readable by its owner alone: it holds texts."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        """`path`: None keeps nothing; `about`: what the parts depend on.

        Raises:
            ConfigError: the file belongs to another measurement, or is none.
        """
        self._path = path
        self._parts: dict[str, Any] = {}
        if path is None:
            return
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file for finished parts")
        first = {"format_version": _VERSION, **about}
        if path.exists() and path.stat().st_size:
            self._read(path, first)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            self._append(first)

    def of(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a finished part; if it isn't there, make and keep it."""
        if name not in self._parts:
            made = make()
            if self._path is None:
                return made
            self._append({"part": name, "value": made})
            self._parts[name] = json.loads(json.dumps(made))
        return self._parts[name]

    def _read(self, path: Path, first: Mapping[str, Any]) -> None:
        lines = path.read_bytes().split(b"\n")
        whole = lines[:-1]  # behind the last line's end is what an interruption left
        about = None
        for line in whole:
            with suppress(ValueError, KeyError, TypeError):  # a damaged part is made again
                found = json.loads(line)
                if about is None:
                    about = found
                else:
                    self._parts[found["part"]] = found["value"]
        if not isinstance(about, dict):
            raise ConfigError(f"{path} holds no finished parts; name another file")
        if about != first:
            raise ConfigError(
                f"{path} belongs to another measurement (other sessions, model, formats or options); name "
                f"another file, or delete it"
            )
        if lines[-1]:
            os.truncate(path, sum(len(line) + 1 for line in whole))

    def _append(self, value: Mapping[str, Any]) -> None:
        assert self._path is not None, "only a file is appended to"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
