"""`kvq bench tune`: which tiles are the fastest on this GPU."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from kvq import fileio
from kvq.bench.attention import fused, over_blocks
from kvq.bench.measure import Contender, Stopwatch, interleaved
from kvq.bench.workload import Workload
from kvq.errors import KVQError
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.shapes import DECODE_ROWS, TileShape
from kvq.kernels.linear.tiles import LinearTile

FORMAT_VERSION = 1
_ALLOWED = 3e-2  # relative error; bf16 rounds probabilities
_Tile = TypeVar("_Tile", TileShape, LinearTile)


def candidates(kind: str) -> list[TileShape]:
    """Shapes worth trying, to decode or to extend."""
    decodes = kind == "decode"
    return [
        TileShape(rows=rows, keys=keys, warps=warps, stages=stages, registers=registers)
        for rows in ((DECODE_ROWS,) if decodes else (64, 128))
        for keys in ((32, 64, 128) if decodes else (32, 64))
        for warps in ((1, 2, 4) if decodes else (4, 8))
        for stages in (3, 5, 7)  # tiles in flight: one, two, three, as rows wait for a table
        for registers in ((None, 168) if decodes else (None,))
    ]


def tune(
    workload: Workload, kv: str, *, repeats: int = 9, progress: Callable[[], None] = lambda: None
) -> tuple[str, TileShape, list[dict[str, Any]]]:
    """Time every shape of attention that compiles and is right; returns its key, the best shape and all rows.

    Raises:
        KVQError: there is none.
    """
    height = workload.new * workload.q_heads // workload.kv_heads
    kind = "decode" if height <= shapes.MOST_DECODE_ROWS else "extend"
    own, cache, batch = over_blocks(workload, kv)
    own = fused(workload, own, cache, batch)
    name, device = shapes.format_name(cache.layer(0)), shapes.device_name(workload.device)
    key = shapes.table_key(kind, name, workload.head_dim, device)
    own = replace(own, allowed=_ALLOWED)
    return key, *fastest(own, key, candidates(kind), repeats=repeats, progress=progress)


def fastest(
    own: Contender,
    key: str,
    found: Sequence[_Tile],
    *,
    repeats: int,
    progress: Callable[[], None] = lambda: None,
) -> tuple[_Tile, list[dict[str, Any]]]:
    """The best tile, and the times of all with which a contender runs and is right.

    Raises:
        KVQError: there is none.
    """
    watches: dict[_Tile, Stopwatch] = {}
    for tile in found:
        with shapes.using(key, tile):
            if _is_right(own):
                watches[tile] = Stopwatch(own.run, own.copies, own.truth.device)
        progress()
    if not watches:
        raise KVQError(f"no tile of {key} compiles and is right on this device; nothing was tuned")
    times = dict(zip(watches, interleaved(list(watches.values()), repeats, lambda: None), strict=True))
    best = min(times, key=lambda tile: times[tile]["ms_median"])
    return best, [{"key": key, **asdict(tile), **time} for tile, time in times.items()]


def _is_right(own: Contender) -> bool:
    try:
        own.check()
    except (RuntimeError, KVQError):  # more registers or shared memory than there are, or wrong
        return False
    return True


def write_table(found: Sequence[tuple[str, TileShape | LinearTile]], path: Path = shapes.TABLE) -> None:
    """Put shapes into the checked-in table; other entries stay."""
    table: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"format_version": FORMAT_VERSION, "shapes": {}}
    )
    for key, shape in found:
        table["shapes"][key] = asdict(shape)
    table["shapes"] = dict(sorted(table["shapes"].items()))
    fileio.write_text(path, json.dumps(table, indent=1) + "\n")
