"""`kvq bench tune`: search for the fastest attention tiles on this GPU, compiling only a few of them."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from kvq import fileio
from kvq.bench.kernels.attention import fused, over_blocks
from kvq.bench.kernels.measure import Contender, Stopwatch, interleaved
from kvq.bench.kernels.workload import Workload
from kvq.bench.timing import percentile
from kvq.errors import KVQError
from kvq.evals.watch import UNWATCHED, Progress
from kvq.kernels import StagedBatch
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.shapes import DECODE_ROWS, TileShape
from kvq.kernels.linear.tiles import LinearTile

Change = dict[str, int | None]
Cost = tuple[float, ...]  # lower is better
Costs = dict[TileShape, Cost | None]  # None: the tile does not compile, or its result is wrong
_DECODE = ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4))  # keys, warps
# According to instruction counts, tiles with 64 keys per warp spill registers, and with 8 warps only one
# program runs, so these are omitted
_EXTEND = ((64, 4), (64, 8), (128, 8))  # rows, warps
_REGISTERS = (None, 168, 128)  # for 8, 12 and 16 warps per multiprocessor
STAGES = range(2, 8)  # two stages need an additional tile, since rows wait for their table entry


def axes(kind: str, stages: Iterable[int] = STAGES) -> list[list[Change]]:
    """Return the search axes for "decode" or "extend": tile sizes, registers and stages."""
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
    """Search each axis in turn, starting from the best tile so far; return all tried tiles with costs."""
    found = {start: cost(start)}
    for axis in ways:
        own = cheapest(found) or start
        for changed in axis:
            tile = replace(own, **changed)  # type: ignore[arg-type]
            if tile not in found:
                found[tile] = cost(tile)
    return found


def cheapest(found: Costs) -> TileShape | None:
    """Return the first tile with the lowest cost, or None if no tile has a cost."""
    had = {tile: cost for tile, cost in found.items() if cost is not None}
    return min(had, key=lambda tile: had[tile], default=None)


FORMAT_VERSION = 1
_ALLOWED = 3e-2  # relative error; bf16 rounds probabilities
_TIMED_IN_TURN = 6  # tiles
_LOOKS = 3  # number of samples per tile in the first round
_Tile = TypeVar("_Tile", TileShape, LinearTile)


def kind_of(workload: Workload) -> str:
    """Return the kind of tile, "decode" or "extend", for the workload's query rows per KV head."""
    height = workload.new * workload.q_heads // workload.kv_heads
    return "decode" if height <= shapes.MOST_DECODE_ROWS else "extend"


def tune(
    workload: Workload, kv: str, *, repeats: int = 9, progress: Progress = UNWATCHED.progress
) -> tuple[str, TileShape, list[dict[str, Any]]]:
    """Time attention tiles; return their key, the best tile, and the rows of the tiles in the final round.

    A first round runs each tile separately to find the tiles that compile and are correct; the fastest
    `_TIMED_IN_TURN` tiles are then timed alternately. For a staged format, the tiles apply to its sealed
    blocks, and timing includes everything that its steps read.

    Raises:
        KVQError: no tile compiles and is correct.
    """
    kind = kind_of(workload)
    own, cache, batch = over_blocks(workload, kv)
    if not isinstance(batch, StagedBatch):
        own = fused(workload, own, cache, batch)
    own = replace(own, allowed=_ALLOWED)
    formats, device = cache.layer(0).formats, shapes.device_name(workload.device)
    size = workload.block_size
    name = shapes.tiled_as(kind, formats, device, size)
    key = shapes.table_key(kind, name, workload.head_dim, device, size)
    present = shapes.shape_for(kind, formats, device, size)
    looks, total = itertools.count(1), sum(map(len, axes(kind)))

    def cost(tile: TileShape) -> Cost | None:
        progress(next(looks), total)
        with shapes.using(key, tile):
            if not _is_right(own):
                return None
            watch = Stopwatch(own.run, own.copies, own.truth.device)
            return (percentile([watch.sample() for _ in range(_LOOKS)], 50),)  # ms

    costs = {tile: cost for tile, cost in search(axes(kind), present, cost).items() if cost is not None}
    first = sorted(costs, key=lambda tile: costs[tile])[:_TIMED_IN_TURN]
    return key, *fastest(own, key, first, repeats=repeats)


def fastest(
    own: Contender, key: str, found: Sequence[_Tile], *, repeats: int
) -> tuple[_Tile, list[dict[str, Any]]]:
    """Time tiles alternately; return the fastest, and the rows of all tiles that run and are correct.

    Raises:
        KVQError: no tile runs and is correct.
    """
    watches: dict[_Tile, Stopwatch] = {}
    for tile in found:
        with shapes.using(key, tile):
            if _is_right(own):
                watches[tile] = Stopwatch(own.run, own.copies, own.truth.device)
    if not watches:
        raise KVQError(f"no tile of {key} compiles and is right on this device; nothing was tuned")
    times = dict(zip(watches, interleaved(list(watches.values()), repeats, UNWATCHED.progress), strict=True))
    best = min(times, key=lambda tile: times[tile]["ms_median"])
    return best, [{"key": key, **asdict(tile), **time} for tile, time in times.items()]


def _is_right(own: Contender) -> bool:
    try:
        own.check()
    except (RuntimeError, KVQError):  # too many registers, too much shared memory, or a wrong result
        return False
    return True


def write_table(
    found: Sequence[tuple[str, TileShape | LinearTile]], path: Path = shapes.TABLE, *, origin: str = "timed"
) -> None:
    """Write tiles to the table, keeping other entries, and timed entries unless `origin` is "timed"."""
    entries: dict[str, Any] = json.loads(path.read_text())["shapes"] if path.exists() else {}
    for key, shape in found:
        if origin == "timed" or entries.get(key, {}).get(shapes.ORIGIN) != "timed":
            entries[key] = {**asdict(shape), shapes.ORIGIN: origin}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries))
    fileio.write_text(path, f'{{\n "format_version": {FORMAT_VERSION},\n "shapes": {{\n{lines}\n }}\n}}\n')
