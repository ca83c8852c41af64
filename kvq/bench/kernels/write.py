"""`kvq bench write`: quantization of one step's K and V into their blocks."""

from collections.abc import Sequence
from typing import Any

import torch

from kvq.bench.kernels.measure import Stopwatch, interleaved
from kvq.bench.kernels.workload import Workload, filled_cache, slots_of
from kvq.errors import KVQError
from kvq.evals.watch import UNWATCHED, Progress
from kvq.kernels.write_kv.reference import write_kv as reference


def bench_write(
    workload: Workload, formats: Sequence[str], *, repeats: int = 20, progress: Progress = UNWATCHED.progress
) -> list[dict[str, Any]]:
    """Time writing the last `new` tokens of every sequence, as in a decode step.

    Raises:
        KVQError: the bytes differ from the reference's bytes; nothing was timed.
    """
    watches: list[Stopwatch] = []
    rows: list[dict[str, Any]] = []
    tokens = len(workload.contexts) * workload.new
    for kv in formats:
        cache, batch, copies = filled_cache(workload, kv)
        shape = (tokens, workload.kv_heads, workload.head_dim)
        source = torch.Generator().manual_seed(workload.seed + 2)
        k, v = (
            torch.randn(shape, generator=source, dtype=torch.float32).to(workload.device, workload.dtype)
            for _ in range(2)
        )
        slots = torch.cat(
            [
                slots_of(
                    table, torch.arange(end - workload.new, end, device=table.device), workload.block_size
                )
                for table, end in zip(batch.tables, workload.contexts, strict=True)
            ]
        )
        _check(cache, k, v, slots, kv)

        def write(copy: int, cache: Any = cache, k: Any = k, v: Any = v, slots: Any = slots) -> Any:
            return cache.write(copy, k, v, slots)

        watches.append(Stopwatch(write, copies, workload.device))
        stored = cache.layout.kv_bytes_per_token / copies * tokens
        name = cache.backend_of("write_kv", 0)
        rows.append({"name": "kvq", "backend": name, "kv": kv, "tokens": tokens})
        rows[-1]["bytes"] = stored + k.nbytes + v.nbytes
    for row, time in zip(rows, interleaved(watches, repeats, progress), strict=True):
        row |= {name.replace("ms", "us"): 1e3 * ms for name, ms in time.items()}
        row["gb_per_s"] = row.pop("bytes") / time["ms_median"] / 1e6
    return rows


def _check(cache: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: str) -> None:
    """Raise KVQError unless the bytes in the pool equal the reference's bytes."""
    cache.write(0, k, v, slots)
    mine = cache.pool(0).clone()
    reference(k, v, cache.layer(0), slots)
    if not torch.equal(mine, cache.pool(0)):
        wrong = int((mine != cache.pool(0)).sum())
        raise KVQError(f"write_kv of {kv} differs from the reference in {wrong} bytes; nothing was timed")
