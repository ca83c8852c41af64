"""What pydantic says against a body, in the words of who sent it."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from kvq.server.problems import Problem

_MAX_KEY = 60  # characters of one that is told


def of_body(complaints: Sequence[Any], body: Any) -> Problem:
    """One of pydantic's complaints against a body: of the first field, the one that got deepest into it."""
    field = _path(complaints[0], body)[:1]
    of_field = takewhile(lambda one: _path(one, body)[:1] == field, complaints)
    found = max(of_field, key=lambda one: len(one["loc"]))
    where = ".".join(_path(found, body))
    message = found["msg"].removeprefix("Value error, ")
    got = f", got {found['input']!r:.50}" if isinstance(found.get("input"), int | float) else ""
    said = f"{where or 'body'}: {message}{'' if ' got ' in message else got}"
    return Problem(400, said, code=found.get("ctx", {}).get("code"), param=where or None)


def _path(complaint: Any, body: Any) -> list[str]:
    """Where in the body it is: the other parts of its place name what a value was taken for."""
    path, value, parts = [], body, complaint["loc"]
    own = complaint.get("ctx", {}).get("at")  # further in than pydantic knows
    for part in (*parts[parts[:1] == ("body",) :], *(() if own is None else (own,))):
        if isinstance(value, dict) and (part in value or complaint["type"] == "missing"):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(f"{part!s:.{_MAX_KEY}}")
    return path
