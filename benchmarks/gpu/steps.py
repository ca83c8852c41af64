"""Decode steps of the engine taken apart: `benchmarks.gpu.engine_steps` over a model of 0.6B shapes."""

from collections.abc import Iterator

from benchmarks.gpu import models
from benchmarks.gpu.case import Case, Rows, Target

LONGEST = 132_096  # tokens, of the slope's model


def step(target: Target) -> Iterator[Case]:
    """Batch 1 and 64 at depth 1,024."""
    for batch in (1, 64):
        for kv in ("bf16", "int4", "fp8"):
            yield Case(
                name=f"step {batch} x 1024, {kv}",
                run=lambda b=batch, kv=kv: measured(target, kv, target.pick(b, min(b, 3)), 1024, 40_960),
            )


def slope(target: Target) -> Iterator[Case]:
    """One sequence of 1k to 128k tokens: what a thousand more cost."""
    for context in (1024, 8192, 32_768, 131_072):
        for kv in ("bf16", "fp8", "int4"):
            yield Case(
                name=f"step 1 x {context}, {kv}",
                run=lambda n=context, kv=kv: measured(target, kv, 1, n, LONGEST),
            )


def measured(target: Target, kv: str, batch: int, context: int, longest: int) -> Rows:
    """One row."""
    from benchmarks.gpu.engine_steps import bench_steps

    read = models.bandwidth(target)
    model = models.model(target, "small", max_position_embeddings=longest)
    row = bench_steps(
        model,
        kv,
        batch=batch,
        context=target.pick(context, context // 64),
        read_gb_per_s=read,
        steps=target.pick(48, 4),
    )
    return [{"model": model.description, "depth": context, "read_gb_per_s": read, **row}]
