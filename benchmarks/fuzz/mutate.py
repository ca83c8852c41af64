"""Values and bytes that are nearly right."""

import copy
import random
from collections.abc import Iterator
from typing import Any

ODD = (
    None, True, False, 0, -1, 1.5, 1e308, -1e308, float("nan"), float("inf"), 10**400, -(10**30), 1 << 64,
    "", "x", "\x1b[2J\x07", "\u202e", "\ud800", "\n\r", "$\\frac{$", "[red]", "a" * 3000, "\x00",
    [], {}, [[]], [None], {"": 0}, [1, "a"], [1e308, -1e308],
)  # fmt: skip
_ODD_BYTES = (b"\x00", b"\xff", b"\r\n", b"\n", b"{", b"9" * 5000, b'"', b"-", b"\\ud800", b"[" * 5000)


def mutated(odds: random.Random, value: Any) -> Any:
    """A copy in which one value, or a few, are others, missing, or there twice."""
    whole = [copy.deepcopy(value)]
    for _ in range(odds.choice((1, 1, 1, 2, 5))):
        holder, key = odds.choice(list(_places(whole)))
        change = odds.randrange(6)
        if change == 0 and holder is not whole:
            del holder[key]
        elif change == 1:
            holder[key] = _nested(odds.choice((3, 60, 70, 200)), odds.random() < 0.5)
        elif change == 2 and isinstance(holder, dict):
            holder[odds.choice(("", "x\x1b", "\ud800", "kv", "rows"))] = holder[key]
        elif change == 3 and isinstance(holder, list) and holder is not whole:
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[key] = copy.deepcopy(odds.choice(ODD))
    return whole[0]


def mutated_bytes(odds: random.Random, content: bytes) -> bytes:
    """Some bytes flipped, cut out, doubled or put in."""
    found = bytearray(content)
    for _ in range(odds.choice((1, 1, 2, 8))):
        at = odds.randrange(len(found) + 1)
        upto = min(len(found), at + odds.choice((1, 1, 4, 100)))
        change = odds.randrange(4)
        if change == 0:
            del found[at:upto]
        elif change == 1:
            found[at:at] = found[at:upto]
        elif change == 2:
            found[at:at] = odds.choice(
                (b"\x00", b"\xff", b"\r\n", b"\n", b"{", b"9" * 5000, b'"', b"-", b"\\ud800", b"[" * 5000)
            )
        else:
            found[at:upto] = odds.randbytes(upto - at)
    return bytes(found)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder of a value with its key or index."""
    holders = [value]
    while holders:
        holder = holders.pop()
        for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            yield holder, key
            if isinstance(item, dict | list):
                holders.append(item)


def _nested(levels: int, is_list: bool) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value] if is_list else {"a": value}
    return value
