"""`kvq bench tune`: search for the fastest tiles of attention on this GPU, compiling few."""

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


FORMAT_VERSION = 1
_ALLOWED = 3e-2  # relative error; bf16 rounds probabilities
_TIMED_IN_TURN = 6  # tiles
_LOOKS = 3  # samples of each tile before that
_Tile = TypeVar("_Tile", TileShape, LinearTile)


def kind_of(workload: Workload) -> str:
    """Return the kind of tiles for the workload's query rows of a KV head: "decode" or "extend"."""
    height = workload.new * workload.q_heads // workload.kv_heads
    return "decode" if height <= shapes.MOST_DECODE_ROWS else "extend"


def tune(
    workload: Workload, kv: str, *, repeats: int = 9, progress: Progress = UNWATCHED.progress
) -> tuple[str, TileShape, list[dict[str, Any]]]:
    """Time tiles of attention; returns their key, the best tile, and the rows of those timed in turn.

    A first look at each tile alone finds those that compile and are right; the fastest `_TIMED_IN_TURN` are
    then timed in turn. The tiles of a staged format are those of its sealed blocks, timed with all that its
    steps read.

    Raises:
        KVQError: no tile compiles and is right.
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
    """Time tiles in turn; returns the best, and the rows of all that run and are right.

    Raises:
        KVQError: there is none.
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
    """Put tiles into the checked-in table. Other entries stay, and timed ones unless `origin` is "timed"."""
    entries: dict[str, Any] = json.loads(path.read_text())["shapes"] if path.exists() else {}
    for key, shape in found:
        if origin == "timed" or entries.get(key, {}).get(shapes.ORIGIN) != "timed":
            entries[key] = {**asdict(shape), shapes.ORIGIN: origin}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries))
    fileio.write_text(path, f'{{\n "format_version": {FORMAT_VERSION},\n "shapes": {{\n{lines}\n }}\n}}\n')
