"""Attention of one layer over blocks, and writing to them: `kvq bench attention` and `write`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.case import Case, Rows, Target

FORMATS = ("bf16", "fp8", "int8", "int4", "int4_g64", "int4_g64_rot", "int4_g32", "int4_g32_rot")
BY_WIDTH = ("int4_mean", "int6", "int5", "int3", "int3_mean", "int2")
_WRITE = "write 256 at 4096"
DENSE = "dense"  # stands for torch's attention alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Shape of one case: 32 query and 8 KV heads of 128, bf16; fewer and smaller in a rehearsal."""

    name: str
    contexts: tuple[int, ...]
    new: int = 1
    block_size: int = 64
    formats: Sequence[str] = FORMATS
    has_rivals: bool = False  # torch's attention and, where they are given, others' kernels
    latent_heads: int | None = None  # query heads of latent attention, with the dimensions of DeepSeek V3

    def workload(self, target: Target) -> Any:
        """Return the shape as a workload of `kvq.bench`."""
        import torch

        from kvq.bench.kernels.workload import Workload

        is_latent = self.latent_heads is not None
        return Workload(
            contexts=self.contexts,
            new=self.new,
            q_heads=self.latent_heads or target.pick(32, 4),
            kv_heads=1 if is_latent else target.pick(8, 2),
            head_dim=64 if is_latent else target.pick(128, 64),
            latent_dim=target.pick(512, 128) if is_latent else None,
            block_size=self.block_size,
            dtype=target.pick(torch.bfloat16, torch.float32),
            device=torch.device(target.device),
            backend=target.backend,
        )


def decode_shapes(target: Target) -> list[Shape]:
    """Batch 64 at depth 8,192, blocks of 64 and 16."""
    contexts = target.pick((8192,) * 64, (130,) * 3)
    return [
        Shape(name="decode 64 x 8192", contexts=contexts, formats=(*FORMATS, *BY_WIDTH), has_rivals=True),
        Shape(name="decode 64 x 8192, blocks of 16", contexts=contexts, block_size=16),
    ]


def long_shapes(target: Target) -> list[Shape]:
    """One sequence of 131,072 tokens, and the slope from 1,024 on."""
    few = ("bf16", "fp8", "int8", "int4", "int4_mean")
    first = Shape(
        name="decode 1 x 131072", contexts=target.pick((131_072,), (700,)), formats=few, has_rivals=True
    )
    return [first] + [
        Shape(name=f"decode 1 x {n}", contexts=(target.pick(n, n // 64),), formats=few)
        for n in (1024, 8192, 32_768)
    ]


def mixed_shapes(target: Target) -> list[Shape]:
    """128 log-normal lengths between 128 and 32,768 beside as many tokens in equal ones."""
    from kvq.bench.kernels.workload import lengths

    count = target.pick(128, 4)
    drawn = lengths(target.pick("128-32768", "8-200"), count, 0)
    even = (sum(drawn) // count,) * count
    few = ("bf16", "int4")
    return [
        Shape(name="decode 128, log-normal", contexts=drawn, formats=few),
        Shape(name="decode 128, equal", contexts=even, formats=few),
    ]


def latent_shapes(target: Target) -> list[Shape]:
    """Batch 64 at depth 8,192 with the heads of one GPU of eight, and with all 128."""
    contexts = target.pick((8192,) * 64, (130,) * 2)
    few = ("bf16", "fp8", "int8", "int4_g64")
    return [
        Shape(name=f"latent decode 64 x 8192, {n} heads", contexts=contexts, formats=few, latent_heads=n)
        for n in (16, 128)
    ]


def extend_shapes(target: Target) -> list[Shape]:
    """2,048 new tokens over 32,768."""
    contexts, new = target.pick((34_816,), (150,)), target.pick(2048, 20)
    return [Shape(name="extend 2048 over 32768", contexts=contexts, new=new, has_rivals=True)]


def write_shapes(target: Target) -> list[Shape]:
    """256 sequences at depth 4,096."""
    return [Shape(name="decode 256 x 4096", contexts=target.pick((4096,) * 256, (66,) * 4))]


def decode(target: Target) -> Iterator[Case]:
    """The first row of the goals."""
    return (case(target, shape) for shape in decode_shapes(target))


def long(target: Target) -> Iterator[Case]:
    """One long sequence."""
    return (case(target, shape) for shape in long_shapes(target))


def mixed(target: Target) -> Iterator[Case]:
    """Uneven lengths."""
    return (case(target, shape) for shape in mixed_shapes(target))


def latent(target: Target) -> Iterator[Case]:
    """Latent attention."""
    return (case(target, shape) for shape in latent_shapes(target))


def extend(target: Target) -> Iterator[Case]:
    """A prefill chunk over a long context."""
    return (case(target, shape) for shape in extend_shapes(target))


def write(target: Target) -> Iterator[Case]:
    """Writing a decode step's tokens, beside the attention of the same step."""
    (shape,) = write_shapes(target)
    pieces = [
        Case(name=f"{_WRITE}: {kv}", run=lambda kv=kv: written(target, shape, [kv])) for kv in shape.formats
    ]
    yield Case(name=_WRITE, run=lambda: written(target, shape, shape.formats), pieces=tuple(pieces))
    yield case(target, shape)


def case(target: Target, shape: Shape) -> Case:
    """All contenders interleaved; should one fail, each alone."""
    singles = [*shape.formats, *([DENSE] if shape.has_rivals else [])]
    pieces = [
        Case(name=f"{shape.name}: {kv}", run=lambda kv=kv: attended(target, shape, [kv])) for kv in singles
    ]
    return Case(
        name=shape.name,
        run=lambda: attended(target, shape, singles),
        limit_s=90,
        pieces=tuple(pieces),
    )


def attended(target: Target, shape: Shape, formats: Sequence[str]) -> Rows:
    """Rows of `kvq bench attention`."""
    from kvq.bench.kernels.attention import bench_attention

    dense = DENSE in formats
    rows, bandwidth = bench_attention(
        shape.workload(target),
        [kv for kv in formats if kv != DENSE],
        rivals=target.rivals if dense and shape.latent_heads is None else None,
        dense_rivals=dense,
        repeats=target.repeats,
    )
    return [{"shape": shape.name, "read_gb_per_s": bandwidth, **row} for row in rows]


def written(target: Target, shape: Shape, formats: Sequence[str]) -> Rows:
    """Rows of `kvq bench write`."""
    from kvq.bench.kernels.write import bench_write

    rows = bench_write(shape.workload(target), formats, repeats=target.repeats)
    return [{"shape": _WRITE, **row} for row in rows]
