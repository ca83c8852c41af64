"""Tile candidates of attention, and a search through them that compiles few."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvq.kernels.gpu.shapes import DECODE_ROWS, TileShape

Change = dict[str, int | None]
Cost = tuple[float, ...]  # the lowest is the best
Costs = dict[TileShape, Cost | None]  # None: it does not compile, or is wrong
_DECODE = ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4))  # keys, warps
# Left out after their instructions were counted: 64 keys of one warp and 128 of two spill registers, and of
# 8 warps only one program runs.
_EXTEND = ((64, 4), (64, 8), (128, 8))  # rows, warps
_REGISTERS = (None, 168, 128)  # for 8, 12 and 16 warps on a multiprocessor
STAGES = range(2, 8)  # two stages hold one more tile, since rows wait for their table's entry


def axes(kind: str, stages: Iterable[int] = STAGES) -> list[list[Change]]:
    """Return the axes of the search, to "decode" or to "extend": the tile, its registers, its stages."""
    decode = [(DECODE_ROWS, *cut) for cut in _DECODE]
    extend = [(rows, keys, warps) for rows, warps in _EXTEND for keys in (32, 64)]
    tiles: list[Change] = [
        {"rows": rows, "keys": keys, "warps": warps}
        for rows, keys, warps in (decode if kind == "decode" else extend)
    ]
    return [tiles, [{"registers": n} for n in _REGISTERS], [{"stages": n} for n in stages]]


def search(
    ways: Sequence[Sequence[Change]], start: TileShape, cost: Callable[[TileShape], Cost | None]
) -> Costs:
    """Search along one axis after another from the best tile so far; returns all tried, with costs."""
    found = {start: cost(start)}
    for axis in ways:
        own = cheapest(found) or start
        for changed in axis:
            tile = replace(own, **changed)  # type: ignore[arg-type]
            if tile not in found:
                found[tile] = cost(tile)
    return found


def cheapest(found: Costs) -> TileShape | None:
    """Return the first tile of the lowest cost; None if all were refused."""
    had = {tile: cost for tile, cost in found.items() if cost is not None}
    return min(had, key=lambda tile: had[tile], default=None)
