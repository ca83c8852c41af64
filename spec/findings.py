"""What is wrong with a file, and JSON read so that everything that could be misread is."""

import hashlib
import json
import math

_MOST_LEVELS = 64
_INTEGERS = range(-(1 << 63), 1 << 64)


class Wrong(Exception):
    """What is not as the specification says, and where."""


def need(holds: bool, what: str) -> None:
    """Raise Wrong unless something holds."""
    if not holds:
        raise Wrong(what)


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def load_json(text: bytes | str, where: str) -> object:
    """The value of a JSON document; bytes are UTF-8."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise Wrong(f"{where}: nested deeper than {_MOST_LEVELS} levels") from error
    except ValueError as error:
        raise Wrong(f"{where}: no JSON ({error})") from error
    _check(value, where, _MOST_LEVELS)
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {max(names, key=names.count)!r:.40} is twice in one object")
    return found


def _check(value: object, where: str, levels: int) -> None:
    if isinstance(value, dict | list):
        need(levels > 0, f"{where}: nested deeper than {_MOST_LEVELS} levels")
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check(step, where, levels)
            _check(item, f"{where}[{step!r:.40}]", levels - 1)
    elif isinstance(value, int):
        need(value in _INTEGERS, f"{where}: an integer of more than 64 bits")
    elif isinstance(value, float):
        need(math.isfinite(value), f"{where}: {value} is no finite number")
    elif isinstance(value, str):
        need(not any("\ud800" <= x <= "\udfff" for x in value), f"{where}: half of a surrogate pair")


def check_keys(data: object, required: set[str], allowed: set[str], where: str) -> None:
    """Raise Wrong unless it is an object with those keys."""
    need(isinstance(data, dict), f"{where}: no JSON object")
    for key in sorted(required - set(data)):
        raise Wrong(f"{where}: no {key!r}")
    for key in sorted(set(data) - required - allowed):
        raise Wrong(f"{where}: unknown key {key!r:.40}")


def integer(value: object, where: str, least: int, most: int) -> int:
    """A whole number of that range, which true and 2.0 are not."""
    need(type(value) is int, f"{where}: {value!r:.40} is no whole number")
    need(least <= value <= most, f"{where}: {value} is not {least} to {most}")
    return value


def items(value: object, where: str, count: int | None = None) -> list:
    """A list, of at least one item or of exactly `count`."""
    need(isinstance(value, list), f"{where}: no list")
    need(
        len(value) > 0 if count is None else len(value) == count,
        f"{where}: {len(value)} items, expected {count or 'some'}",
    )
    return value


def text(value: object, where: str) -> str:
    need(isinstance(value, str), f"{where}: {value!r:.40} is no text")
    return value
