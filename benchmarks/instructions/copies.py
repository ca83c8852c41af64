"""Copies to shared memory that are under way while a tile is worked on, read from Triton's form of a loop."""

import re
from typing import Any, NamedTuple

_PRODUCT = re.compile(r"tt\.dot |warp_group_dot |tc_gen5_mma ")
_WAIT = re.compile(r"async_wait .*?num = (\d+)")
_LOAD = re.compile(r"(%[\w#]+) = tt\.load ")
_ROOM = re.compile(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(\d+)x")


class Copies(NamedTuple):
    """Of the loop that multiplies."""

    buffers: int  # tiles that there is room for; 0 if nothing is copied asynchronously
    waits: list[int]  # groups of copies that each wait in the loop leaves under way
    groups: int  # of copies that a round of the loop begins
    tiles: float  # under way wherever a product begins, at least
    awaited_loads: int  # into registers, for an address in the same round as a rule


def copies(ttgir: str) -> Copies:
    """Groups that a wait leaves and those begun since, at every product, over those of a round."""
    body = _loop(ttgir)
    waits = [int(found[1]) for line in body if (found := _WAIT.search(line))]
    groups = sum("async_commit_group" in line for line in body)
    buffers = max((int(n) for n, _ in _ROOM.findall(ttgir)), default=0) if groups else 0
    least = min(_under_way(body), default=0)
    tiles = round(least / groups, 2) if groups else 0.0
    return Copies(buffers, waits, groups, tiles, _awaited_loads(body))


def _awaited_loads(body: list[str]) -> int:
    """Those whose value is asked for in the round that they are begun in."""
    found = 0
    for i, line in enumerate(body):
        if load := _LOAD.search(line):
            asks = re.compile(rf"{re.escape(load[1])}(?![\w#])")
            found += any(asks.search(later) for later in body[i + 1 :] if "scf.yield" not in later)
    return found


def _under_way(body: list[str]) -> list[int]:
    """At each product after the first wait; a second round begins with what the first one left."""
    pending, found = None, []
    for line in body + body:
        if wait := _WAIT.search(line):
            left = int(wait[1])
            pending = left if pending is None else min(pending, left)
        elif pending is not None and "async_commit_group" in line:
            pending += 1
        elif pending is not None and _PRODUCT.search(line):
            found.append(pending)
    return found


def _loop(ttgir: str) -> list[str]:
    """The lines of the longest loop that multiplies and holds no other that does."""
    found: list[list[str]] = []
    open_loops: list[tuple[int, list[str]]] = []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        while open_loops and indent <= open_loops[-1][0]:
            found.append(open_loops.pop()[1])
        for _, lines in open_loops:
            lines.append(line)
        if "scf.for" in line:
            open_loops.append((indent, []))
    multiplying = [body for body in found if any(map(_PRODUCT.search, body))]
    inner = [body for body in multiplying if not any(_holds(body, other) for other in multiplying)]
    return max(inner, key=len, default=[])


def _holds(body: list[str], other: list[Any]) -> bool:
    return body is not other and other[0] in body
