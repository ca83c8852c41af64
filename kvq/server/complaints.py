"""What pydantic says against a body, in the words of who sent it."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from kvq.server.problems import Problem

_TYPES = ("str", "int", "float", "bool", "dict", "list")  # that it tried


def of_body(complaints: Sequence[Any]) -> Problem:
    """One of pydantic's complaints: of the first field, the one that got deepest into what it may be."""
    field = complaints[0]["loc"][:2]
    of_field = takewhile(lambda one: one["loc"][:2] == field, complaints)
    found = max(of_field, key=lambda one: len(one["loc"]))
    where = ".".join(str(part) for part in found["loc"] if part != "body" and _is_key(part))
    got = f", got {found['input']!r:.50}" if isinstance(found["input"], int | float) else ""
    return Problem(400, f"{where or 'body'}: {found['msg']}{got}", param=where or None)


def _is_key(part: str | int) -> bool:
    """Whether it is the body's own: the other parts name what its value was taken for."""
    if isinstance(part, int):
        return True
    return part.isidentifier() and part.islower() and part not in _TYPES
