"""Choosing the tokens of 256 rows over a vocabulary of 152k."""

from collections.abc import Iterator

from benchmarks.gpu.case import Case, Rows, Target


def cases(target: Target) -> Iterator[Case]:
    """A case for each kind of parameters; all together first."""
    from benchmarks.gpu.sampling import KINDS

    for rows in target.pick((256, 1), (4,)):
        pieces = [
            Case(name=f"sampling, {rows} rows: {kind}", run=lambda r=rows, k=kind: measured(target, r, (k,)))
            for kind in KINDS
        ]
        yield Case(
            name=f"sampling, {rows} rows",
            run=lambda r=rows: measured(target, r, tuple(KINDS)),
            pieces=tuple(pieces),
        )


def measured(target: Target, rows: int, kinds: tuple[str, ...]) -> Rows:
    """Rows of `benchmarks.gpu.sampling`."""
    import torch

    from benchmarks.gpu.sampling import SamplingWorkload, bench_sampling

    workload = SamplingWorkload(
        rows=rows,
        vocab_size=target.pick(151_936, 3000),
        dtype=target.pick(torch.bfloat16, torch.float32),
        device=torch.device(target.device),
    )
    return bench_sampling(workload, kinds, repeats=target.repeats)
