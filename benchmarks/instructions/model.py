"""How long decode attention takes, modelled from what was counted: bytes, slots, latency, waves of programs.

    python -m benchmarks.instructions --kernel "attend decode" --sm 90 --out build/counted.json
    python -m benchmarks.instructions.model build/counted.json [--card h200]

These are results of a model, not of a GPU. docs/gpu.md says how far it can be trusted.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import goals
from benchmarks.instructions.cards import CARDS, SCHEDULERS, Card
from benchmarks.instructions.table import Table, markdown

READ_SHARE = 0.9  # of the data sheet's bandwidth that a kernel that only reads is taken to reach
ERROR = 0.15  # of the model, where there is something to compare it with
KV_HEADS = 8
SHAPES = {"decode 64 x 8192": (64, 8192), "decode 1 x 131072": (1, 131_072)}  # sequences, tokens
CYCLES = (4.0, 10.0)  # least and most that an instruction of a lone warp may take: nobody told
_HALF_RATE = ("bits", "integer", "convert")  # 64 lanes a clock on sm80 to sm90, half of what is issued
_WARPS, _LEAST, _START = (
    24,
    256,
    64,
)  # of all programs a multiprocessor; keys of a program, and those of its start


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A decode kernel's loop as counted."""

    kv: str
    instructions: int  # of a warp
    half_rate: int  # of these
    warps: int
    keys: int
    key_bytes: int
    programs_at_once: int
    tiles_under_way: float
    awaits_loads: bool

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Loop":
        """From a row of the table."""
        same = ("kv", "warps", "keys", "key_bytes", "programs_at_once", "tiles_under_way")
        return cls(
            **{name: row[name] for name in same},
            instructions=row["loop_instructions"],
            half_rate=sum(row["kinds"].get(kind, 0) for kind in _HALF_RATE),
            awaits_loads=row["awaited_loads"] > 0,
        )


class Machine(NamedTuple):
    """What is not counted."""

    cycles: float  # that an instruction of a lone warp takes
    latency_us: float  # of memory
    sharpness: float  # of the transition between limits: high where the largest alone decides


class Published(NamedTuple):
    """Decode steps of a whole model by others' kernel, whose code is public and was counted as ours."""

    source: str
    card: str
    layers: int
    loop: Loop
    programs: int
    splits: int  # of a sequence: programs that share its keys
    tokens_per_s: dict[int, float]  # by context, one sequence

    @property
    def key_us(self) -> float:
        """What a token of context costs a layer: the slope of a step's time, by least squares."""
        xs, ys = list(self.tokens_per_s), [1e6 / y / self.layers for y in self.tokens_per_s.values()]
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


# SGLang's grouped decode kernel (stage 1) for Qwen3-8B, compiled by Triton 3.6.0 for sm90.
_SGLANG = Loop(
    kv="bf16", instructions=266, half_rate=49, warps=4, keys=32, key_bytes=512, programs_at_once=6,
    tiles_under_way=0.0, awaits_loads=True,
)  # fmt: skip
_SOURCE = "github.com/sgl-project/sglang/pull/21775, one H100, Qwen3-8B"
FEW = Published(
    _SOURCE, "h100", 36, _SGLANG, 8 * KV_HEADS, 8,
    {1000: 141.37, 2000: 132.60, 4000: 118.36, 8000: 98.63, 16_000: 74.12, 32_000: 48.35},
)  # fmt: skip
MANY = Published(
    _SOURCE, "h100", 36, _SGLANG, 64 * KV_HEADS, 64,
    {1000: 144.00, 2000: 140.32, 4000: 138.60, 8000: 133.60, 16_000: 125.28, 32_000: 110.62},
)  # fmt: skip


def tile_us(loop: Loop, card: Card, machine: Machine, programs: int) -> float:
    """What a tile takes each of `programs` that run at once.

    The longest of: a program alone, with the memory that it waits for; what its multiprocessor issues, and
    its pipe of half rate; the bytes of all. Where two are near each other, more than either.
    """
    clock = card.clock_ghz * 1e3  # a microsecond
    waits = loop.awaits_loads + (loop.tiles_under_way < 1)
    alone = loop.instructions * machine.cycles / clock + waits * machine.latency_us
    if loop.tiles_under_way >= 1:
        alone = max(alone, machine.latency_us / loop.tiles_under_way)
    beside = -(-programs // card.multiprocessors)
    issued = beside * loop.warps * max(loop.instructions, 2 * loop.half_rate) / SCHEDULERS / clock
    read = programs * loop.keys * loop.key_bytes / (READ_SHARE * card.bandwidth) * 1e6
    limits = alone, issued, read
    return max(limits) * sum((x / max(limits)) ** machine.sharpness for x in limits) ** (
        1 / machine.sharpness
    )


def published_us(found: Published, machine: Machine) -> float:
    """The model's `key_us`."""
    return tile_us(found.loop, _card(found.card), machine, found.programs) / found.loop.keys / found.splits


def fitted(cycles: float) -> Machine:
    """Latency from few programs, sharpness from many, both by bisection."""

    def latency(sharpness: float) -> Machine:
        def slow(us: float) -> bool:
            return published_us(FEW, Machine(cycles, us, sharpness)) > FEW.key_us

        return Machine(cycles, _bisected(0.0, 10.0, slow), sharpness)

    sharpness = _bisected(1.0, 64.0, lambda x: published_us(MANY, latency(x)) < MANY.key_us)
    return latency(sharpness)


def _bisected(low: float, high: float, is_too_high: Callable[[float], bool]) -> float:
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if is_too_high(middle) else (middle, high)
    return low


def attention_us(loop: Loop, card: Card, machine: Machine, sequences: int, depth: int) -> float:
    """One launch over sequences of one length, cut into programs as kvq cuts them, in waves."""
    keys = sequences * depth * KV_HEADS
    programs = min(card.multiprocessors * _WARPS // loop.warps, keys // _LEAST)
    tiles = (keys / programs + _START) / loop.keys + 0.5  # the last one is full or not
    at_once = card.multiprocessors * loop.programs_at_once
    waves = [at_once] * (programs // at_once) + [programs % at_once]
    return sum(tiles * tile_us(loop, card, machine, n) for n in waves if n)


def rows(loops: Iterable[Loop], card: Card, machine: Machine) -> list[dict[str, Any]]:
    """As a run on a GPU would have them, so that the same goals judge them."""
    return [
        {
            "shape": shape,
            "kv": loop.kv,
            "name": "kvq",
            "ms_median": us / 1e3,
            "fraction_of_bandwidth": read / us,
        }
        for loop in loops
        for shape, size in SHAPES.items()
        for us in [attention_us(loop, card, machine, *size)]
        for read in [size[0] * size[1] * KV_HEADS * loop.key_bytes / (READ_SHARE * card.bandwidth) * 1e6]
    ]


def tables(loops: list[Loop], card: Card) -> list[Table]:
    """Times, and goals with what is expected of them."""
    ends = [rows(loops, card, fitted(cycles)) for cycles in CYCLES]
    times = [["format", "workload", "ms", "share of read bandwidth"]]
    for a, b in zip(*ends, strict=True):
        shown = [_span(a[key], b[key], 2) for key in ("ms_median", "fraction_of_bandwidth")]
        times.append([a["kv"], a["shape"], *shown])
    found = [["goal", "modelled", "expected"]]
    for goal in goals.GOALS:
        values = [value for end in ends if (value := goal.value(end)) is not None]
        if values:
            told = goal.judged(ends[0])["goal"]
            found.append([told, _span(min(values), max(values), 2), expected(goal, values)])
    return [times, found]


def expected(goal: goals.Goal, values: list[float]) -> str:
    """Yes if all meet it by more than the model's error, no if all miss it by more, else open."""
    over = [value / goal.bound for value in values]
    best, worst = min(over), max(over)
    if not goal.at_most:
        best, worst = 1 / worst, 1 / best
    return "yes" if worst * (1 + ERROR) <= 1 else "no" if best > 1 + ERROR else "open"


def _span(a: float, b: float, digits: int) -> str:
    low, high = f"{min(a, b):.{digits}f}", f"{max(a, b):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _card(name: str) -> Card:
    return next(card for card in CARDS if card.name == name)


def main() -> None:
    """Print what the model says of counted kernels."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions.model")
    parser.add_argument("counted", type=Path, help="of python -m benchmarks.instructions --out")
    parser.add_argument("--card", default="h200", choices=[card.name for card in CARDS])
    options = parser.parse_args()
    card, counted = _card(options.card), json.loads(options.counted.read_text())
    wanted = {"device": card.device, "kernel": "attend decode"}
    mine = [row for row in counted["rows"] if wanted.items() <= row.items() and "error" not in row]
    for cycles in CYCLES:
        machine = fitted(cycles)
        print(f"{cycles:g} cycles: {machine.latency_us:.2f} us, sharpness {machine.sharpness:.1f}")
    print(f"\n{card.name}, Triton {counted['triton']}: a model's results, not measured\n")
    for found in tables([Loop.of(row) for row in mine], card):
        print(f"{markdown(found)}\n")


if __name__ == "__main__":
    main()
