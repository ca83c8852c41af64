"""Parts to check and measure, in order of value. Nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A part runs in a process of its own and gives one file."""

    name: str
    cases: str  # module:function, which yields the cases of a target
    limit_s: float
    what: str
    when_asked: bool = False  # only if it is named


PARTS = (
    Part("facts", "benchmarks.gpu.facts:cases", 60, "device, versions, bandwidth, products"),
    Part("warm", "benchmarks.gpu.warm:cases", 120, "kernels compiled by many processes at once"),
    Part("tests", "benchmarks.gpu.checks:tests", 200, "tests/gpu"),
    Part("decode", "benchmarks.gpu.attention:decode", 120, "attention, batch 64 x 8,192"),
    Part("step", "benchmarks.gpu.steps:step", 150, "decode steps of a 0.6B model taken apart"),
    Part("engine", "benchmarks.gpu.engine:small", 240, "256 requests to a 0.6B model"),
    Part("engine8b", "benchmarks.gpu.engine:large", 300, "64 sequences of 8,192 tokens in an 8B model"),
    Part("long", "benchmarks.gpu.attention:long", 120, "attention, 1 x 131,072 and less"),
    Part("mixed", "benchmarks.gpu.attention:mixed", 60, "attention, 128 log-normal lengths and equal ones"),
    Part("extend", "benchmarks.gpu.attention:extend", 120, "attention, 2,048 tokens over 32,768"),
    Part("write", "benchmarks.gpu.attention:write", 60, "256 tokens quantized and appended"),
    Part("latent", "benchmarks.gpu.attention:latent", 90, "latent attention, batch 64 x 8,192"),
    Part("slope", "benchmarks.gpu.steps:slope", 150, "decode steps of one sequence, 1k to 128k tokens"),
    Part("linear", "benchmarks.gpu.linear:cases", 150, "Linear layers over quantized weights"),
    Part("sampler", "benchmarks.gpu.sampler:cases", 60, "tokens for 256 rows of 152k logits"),
    Part("tune", "benchmarks.gpu.tuning:attention", 400, "the fastest tiles of attention", True),
    Part("tune-linear", "benchmarks.gpu.tuning:linear", 400, "the fastest tiles of Linear layers", True),
    Part("sanitizer", "benchmarks.gpu.checks:sanitizer", 300, "some tests under compute-sanitizer", True),
)


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts of these names, in their order; without names all but those that have to be asked for.

    Raises:
        ValueError: a name that is none.
    """
    by_name = {part.name: part for part in PARTS}
    if unknown := sorted(set(names) - set(by_name)):
        raise ValueError(f"unknown parts {', '.join(unknown)}; known: {', '.join(by_name)}")
    return [by_name[name] for name in names] or [part for part in PARTS if not part.when_asked]
