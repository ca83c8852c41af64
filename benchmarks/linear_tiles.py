"""Tiles of Linear layers' products: search for the fastest on this GPU."""

from typing import Any

from kvq.bench.kernels.linear import LinearWorkload, over_codes
from kvq.bench.kernels.tune import fastest
from kvq.kernels.gpu import shapes
from kvq.kernels.linear import tiles
from kvq.kernels.linear.tiles import LinearTile


def candidates(rows: int) -> list[LinearTile]:
    """Tiles worth trying for a class of rows."""
    many = rows == tiles.MANY_ROWS
    return [
        LinearTile(rows=height, outputs=outputs, warps=warps, stages=stages, programs=programs)
        for height in ((64, 128) if many else (rows,))
        for outputs in ((128, 256) if many else (64, 128, 256))
        for warps in ((4, 8) if many else (2, 4, 8))
        for stages in ((3, 4) if rows > 32 else (3, 4, 6))
        for programs in ((1,) if many else (1, 2, 4, 8))
    ]


def tune_linear(
    workload: LinearWorkload, name: str, *, repeats: int = 5
) -> tuple[str, LinearTile, list[dict[str, Any]]]:
    """Tune a product over weights of a format for the class of its rows; see `kvq.bench.kernels.tune.tune`.

    Raises:
        KVQError: no tile compiles and is right.
    """
    rows = tiles.row_class(workload.rows)
    key = shapes.table_key("linear", name, rows, shapes.device_name(workload.device))
    own = over_codes(workload, name)
    return key, *fastest(own, key, candidates(rows), repeats=repeats)
