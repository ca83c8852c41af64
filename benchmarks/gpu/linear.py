"""Linear layers of an 8B model beside torch's bf16, from one row to a prefill chunk: `kvq bench linear`."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.case import Case, Rows, Target

SHAPES = ((4096, 14_336), (14_336, 4096), (4096, 4096))  # inputs, outputs
ROWS = (1, 4, 16, 64, 256, 2048)
WEIGHTS = ("int4_g128", "int4_g128_asym", "int8", "w8a8", "fp8", "fp8_a8")


def cases(target: Target) -> Iterator[Case]:
    """A case for each layer and number of rows, the first layer first."""
    for shape in target.pick(SHAPES, ((256, 48),)):
        for rows in target.pick(ROWS, (1, 5)):
            name = f"linear {shape[0]} to {shape[1]}, {rows} rows"
            pieces = [
                Case(name=f"{name}: {kind}", run=lambda s=shape, r=rows, k=kind: measured(target, s, r, [k]))
                for kind in WEIGHTS
            ]
            yield Case(
                name=name,
                run=lambda s=shape, r=rows: measured(target, s, r, WEIGHTS),
                pieces=tuple(pieces),
            )


def workload(target: Target, shape: tuple[int, int], rows: int) -> Any:
    """Return a layer as a workload of `kvq.bench`."""
    import torch

    from kvq.bench.kernels.linear import LinearWorkload

    return LinearWorkload(
        in_features=shape[0],
        out_features=shape[1],
        rows=rows,
        dtype=target.pick(torch.bfloat16, torch.float32),
        device=torch.device(target.device),
        backend=target.backend,
    )


def measured(target: Target, shape: tuple[int, int], rows: int, kinds: Sequence[str]) -> Rows:
    """Rows of `kvq bench linear`, with the speedup over torch's bf16."""
    from kvq.bench.kernels.linear import bench_linear

    found, bandwidth = bench_linear(
        workload(target, shape, rows), kinds, rivals=not target.is_rehearsal, repeats=target.repeats
    )
    plain_ms = next((row["ms_median"] for row in found if row["weights"] == "bfloat16"), None)
    for row in found:
        row |= {"layer": f"{shape[0]} to {shape[1]}", "read_gb_per_s": bandwidth}
        row["speedup_over_bf16"] = None if plain_ms is None else plain_ms / row["ms_median"]
    return found
