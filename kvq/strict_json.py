"""Strict JSON for external input: rejects documents that other parsers misread or fail on.

The parser rejects NaN and infinities, numbers beyond 64 bits or a float's range, duplicate names in one
object, unpaired surrogates, and values nested deeper than `MAX_DEPTH`.
"""

import json
import math
from pathlib import Path
from typing import Any

MAX_DEPTH = 64  # levels of nested values; later encoders recurse
MAX_FILE = 256 << 20  # bytes
_INTEGERS = range(-(1 << 63), 1 << 64)  # the range of MessagePack
_SHOWN = 40  # characters of a name in an error
_STEPS = 6  # maximum number of steps shown of the path to a rejected value


def loads(text: str | bytes) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: the text is not JSON, or contains a rejected value; the message names the field.
    """
    try:
        value = _DECODER.decode(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return check_value(value)


def read(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: the file can't be read.
        ValueError: as for `loads`, or the file is larger than `MAX_FILE`.
    """
    with path.open("rb") as file:
        raw = file.read(MAX_FILE + 1)
    if len(raw) > MAX_FILE:
        raise ValueError(f"it may have {MAX_FILE} bytes")
    return loads(raw)


def check_value(value: Any) -> Any:
    """Return the value if it contains nothing that must be rejected.

    Raises:
        ValueError: the value contains a rejected value; the message names the field.
    """
    try:
        _check(value, MAX_DEPTH)
    except _Refused as error:
        raise ValueError(error.message()) from None
    return value


_TOO_DEEP = f"values may be nested {MAX_DEPTH} levels deep"


class _Refused(Exception):
    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: list[str | int] = []  # innermost first

    def message(self) -> str:
        steps = list(reversed(self.path))[:_STEPS]
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step!s:.{_SHOWN}}" for step in steps)
        return f"{where.removeprefix('.')}: {self}" if where else str(self)


def _check(value: Any, levels: int) -> None:
    """Raise _Refused, with the path, if a value must be rejected. Recurses at most `MAX_DEPTH` levels."""
    if isinstance(value, dict | list):
        if not levels:
            raise _Refused(_TOO_DEEP)
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            try:
                _check_text(step)
                _check(item, levels - 1)
            except _Refused as error:
                error.path.append(step)
                raise
    elif isinstance(value, int):
        if value not in _INTEGERS:
            raise _Refused("integers may have 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _Refused("numbers must be finite")
    else:
        _check_text(value)


def _check_text(value: object) -> None:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Refused("texts must be Unicode, without halves of surrogate pairs") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the name {twice:.{_SHOWN}} is twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
