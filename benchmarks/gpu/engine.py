"""The engine as a service: `kvq bench engine` over models of random weights."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.case import Case, Rows, Target

_KEPT = 0.85  # of free memory, for K and V of the large model


def small(target: Target) -> Iterator[Case]:
    """256 requests of 100 to 1,024 tokens in and out, with room for all, in a quarter of it, and a rival."""
    formats = ("bf16", "int4")
    for name, limit in (("all fit", 1.0), ("a quarter fits", 0.25)):
        pieces = [
            Case(name=f"0.6B, {name}: {kv}", run=lambda kv=kv, q=limit: served(target, [kv], q), limit_s=120)
            for kv in formats
        ]
        yield Case(
            name=f"0.6B, {name}",
            run=lambda q=limit: served(target, formats, q),
            limit_s=150,
            pieces=tuple(pieces),
        )
    yield Case(
        name="0.6B, beside transformers",
        run=lambda: served(target, ["bf16"], 1.0, seats=128, rivals=("hf-continuous",)),
        limit_s=200,
    )


def served(
    target: Target, formats: Sequence[str], share: float, *, seats: int = 256, rivals: tuple[str, ...] = ()
) -> Rows:
    """Rows of `kvq bench engine`; K and V get that share of what all requests need in bf16.

    `seats`: requests at a time. A rival has its own pool and logits of whole steps beside kvq's.
    """
    from kvq.bench.engine.engine import EnginePlan, bench_engine
    from kvq.bench.engine.load import burst
    from kvq.engine import EngineConfig

    model = models.model(target, "small", stored=True)
    high = target.pick(1024, 40)
    load = burst(model, target.pick(256, 16), (target.pick(100, 9), high), (target.pick(100, 9), high))
    demand = sum(request.tokens for request in load.draw(0)) * model.with_kv("bf16").kv_bytes_per_token
    limits = EngineConfig(
        max_num_seqs=min(seats, load.num_requests),
        max_num_batched_tokens=32 * seats,
        kv_memory=None if share == 1 else round(share * demand),
    )
    plan = EnginePlan(load=load, config=limits, rivals=rivals, repeats=1)
    rows = bench_engine(model, formats, plan)
    return [{"model": model.description, "share_of_demand": share, **row} for row in rows]


def large(target: Target) -> Iterator[Case]:
    """8B shapes: decode steps at depth 8,192 taken apart, then requests from end to end."""
    for kv in ("bf16", "int4"):
        yield Case(name=f"8B, step at 8192, {kv}", run=lambda kv=kv: taken_apart(target, kv), limit_s=120)
    pieces = [
        Case(name=f"8B, requests: {kv}", run=lambda kv=kv: from_end_to_end(target, [kv]), limit_s=150)
        for kv in ("int4", "bf16")
    ]
    yield Case(
        name="8B, requests",
        run=lambda: from_end_to_end(target, ["bf16", "int4"]),
        limit_s=200,
        pieces=tuple(pieces),
    )


def taken_apart(target: Target, kv: str) -> Rows:
    """A decode step of as many sequences of 8,192 tokens as fit in bf16, 64 at most."""
    from benchmarks.gpu.engine_steps import bench_steps

    read = models.bandwidth(target)
    model = models.model(target, "large")
    row = bench_steps(
        model,
        kv,
        batch=batch(target, model, ["bf16"]),
        context=target.pick(8192, 48),
        read_gb_per_s=read,
        steps=target.pick(32, 4),
    )
    return [{"model": model.description, "depth": 8192, "read_gb_per_s": read, **row}]


def from_end_to_end(target: Target, formats: Sequence[str]) -> Rows:
    """Serve as many requests of 7,680 and 512 tokens as fit in both formats, 64 at most, all at once."""
    from kvq.bench.engine.engine import EnginePlan, bench_engine
    from kvq.bench.engine.load import burst
    from kvq.engine import EngineConfig

    model = models.model(target, "large")
    count = batch(target, model, ["bf16", "int4"])  # whatever is measured, so that runs compare
    prompt, output = target.pick(7680, 40), target.pick(512, 8)
    load = burst(model, count, (prompt, prompt), (output, output))
    limits = EngineConfig(max_num_seqs=count, max_num_batched_tokens=8192, prefix_caching=False)
    rows = bench_engine(model, formats, EnginePlan(load=load, config=limits, repeats=1))
    return [{"model": model.description, **row} for row in rows]


def batch(target: Target, model: Any, formats: Sequence[str]) -> int:
    """Sequences of 8,448 tokens, 64 at most, whose K and V fit in all these formats at once."""
    token_bytes = sum(model.with_kv(kv).kv_bytes_per_token for kv in formats)
    fit = _KEPT * models.free_bytes(target) // (8448 * token_bytes)
    return max(1, min(target.pick(64, 3), int(fit)))
