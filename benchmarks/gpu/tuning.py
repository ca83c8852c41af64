"""The fastest tiles on this GPU, into kvq/kernels/gpu/shapes.json, of which a copy is kept."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.attention import BY_WIDTH, Shape
from benchmarks.gpu.case import Case, Rows, Target
from benchmarks.gpu.linear import SHAPES, WEIGHTS, workload


def attention(target: Target) -> Iterator[Case]:
    """Yield cases of decodes and extends, format by format."""
    from kvq.bench.kernels import tune as tuning

    formats = ("bf16", "fp8", "int8", "int4_g64", "int4_g32", "int4", *BY_WIDTH)
    few, many = (8192,) * 32, (8192,) * 2
    for kv in formats:
        for name, contexts, new in (("decode", few, 1), ("extend", many, 1024)):
            if new > 1 and "mean" in kv:  # staged, which is timed in decode only
                continue
            shape = Shape(name=name, contexts=contexts, new=new)
            yield Case(
                name=f"tune {name}, {kv}",
                run=lambda s=shape, kv=kv: _tuned(target, lambda: tuning.tune(s.workload(target), kv)),
                limit_s=120,
            )


def linear(target: Target) -> Iterator[Case]:
    """Yield cases of Linear layers, format by format and class by class of rows."""
    from benchmarks import linear_tiles
    from kvq.kernels.linear import tiles

    for kind in WEIGHTS:
        for height in (*tiles.ROW_CLASSES, tiles.MANY_ROWS):
            rows = 256 if height == tiles.MANY_ROWS else height
            layer = workload(target, SHAPES[0], rows)
            yield Case(
                name=f"tune linear {kind}, {rows} rows",
                run=lambda x=layer, k=kind: _tuned(target, lambda: linear_tiles.tune_linear(x, k)),
                limit_s=120,
            )


def _tuned(target: Target, find: Callable[[], tuple[str, Any, Rows]]) -> Rows:
    """All tiles that were tried; the best is written down at once."""
    from kvq.bench.kernels.tune import write_table
    from kvq.kernels.gpu import shapes

    key, best, tried = find()
    write_table([(key, best)])
    shutil.copy(shapes.TABLE, target.out / shapes.TABLE.name)
    return [
        {**row, "is_best": all(row[name] == value for name, value in asdict(best).items())} for row in tried
    ]
