"""`kvq bench tune`: which tile shapes are the fastest on this GPU."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvq import fileio
from kvq.bench.measure import Stopwatch, interleaved
from kvq.bench.truth import exact_attention, relative_error
from kvq.bench.workload import Workload, filled_cache, queries
from kvq.errors import KVQError
from kvq.kernels import AttentionOptions
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.shapes import DECODE_ROWS, TileShape
from kvq.kernels.linear.tiles import LinearTile

FORMAT_VERSION = 1
_ALLOWED = 3e-2  # relative error; bf16 rounds probabilities


def candidates(kind: str) -> list[TileShape]:
    """Shapes worth trying."""
    if kind == "decode":
        return [
            TileShape(rows=DECODE_ROWS, keys=keys, warps=warps, stages=stages)
            for keys in (32, 64, 128)
            for warps in (2, 4, 8)
            for stages in (2, 3, 4)
        ]
    return [
        TileShape(rows=rows, keys=keys, warps=warps, stages=stages)
        for rows in (64, 128)
        for keys in (32, 64)
        for warps in (4, 8)
        for stages in (2, 3)
    ]


def tune(
    workload: Workload, kv: str, *, repeats: int = 9, progress: Callable[[], None] = lambda: None
) -> tuple[str, TileShape, list[dict[str, Any]]]:
    """Time every shape that compiles and is right; returns its key, the best shape and all rows.

    Raises:
        KVQError: there is none.
    """
    height = workload.new * workload.q_heads // workload.kv_heads
    kind = "decode" if height <= shapes.MOST_DECODE_ROWS else "extend"
    cache, batch, copies = filled_cache(workload, kv, "triton")
    q = queries(workload).flatten(0, 1)
    layer = cache.layer(0)
    key = shapes.table_key(
        kind, shapes.format_name(layer), workload.head_dim, shapes.device_name(workload.device)
    )

    def attend(copy: int) -> torch.Tensor:
        return cache.attend(
            copy,
            q,
            batch,
            AttentionOptions(scale=workload.head_dim**-0.5),
        )[0]

    k, v = cache.gather(0, batch.tables[-1:], 0, workload.contexts[-1], unrotate=True)
    want = exact_attention(q[-workload.new :], k[0], v[0], workload.head_dim**-0.5)
    tried, watches = [], []
    for shape in candidates(kind):
        with shapes.using(key, shape):
            try:
                out = attend(0)
            except RuntimeError:  # more registers or shared memory than there are
                continue
            if not relative_error(out[-workload.new :], want) < _ALLOWED:
                continue
            tried.append(shape)
            watches.append(Stopwatch(attend, copies, workload.device))
        progress()
    if not tried:
        raise KVQError(f"no tile shape of {key} compiles and is right on this device; nothing was tuned")
    times = interleaved(watches, repeats, lambda: None)
    rows = [{"key": key, **asdict(x), **time} for x, time in zip(tried, times, strict=True)]
    best = min(range(len(tried)), key=lambda i: times[i]["ms_median"])
    return key, tried[best], rows


def write_table(found: Sequence[tuple[str, TileShape | LinearTile]], path: Path = shapes.TABLE) -> None:
    """Put shapes into the checked-in table; other entries stay."""
    table: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"format_version": FORMAT_VERSION, "shapes": {}}
    )
    for key, shape in found:
        table["shapes"][key] = asdict(shape)
    table["shapes"] = dict(sorted(table["shapes"].items()))
    fileio.write_text(path, json.dumps(table, indent=1) + "\n")
