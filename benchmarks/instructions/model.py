"""How long decode attention takes, modelled from what was counted: bytes, slots, latency, waves of programs.

    python -m benchmarks.instructions --kernel decode --sm 90 --kv bf16,int4_mean --out build/counted.json
    python -m benchmarks.instructions.model build/counted.json [--card h200]

These are results of a model, not of a GPU. docs/gpu.md says how far it can be trusted.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import goals
from benchmarks.instructions.cards import CARDS, SCHEDULERS, Card
from benchmarks.instructions.table import Table, markdown

READ_SHARE = 0.916  # of the data sheet's bandwidth that a sum reached on an H200
ERROR = 0.15  # of the model: nine in ten of the tiles that it is fitted to are within
KV_HEADS = 8
SHAPES = {"decode 64 x 8192": (64, 8192), "decode 1 x 131072": (1, 131_072)}  # sequences, tokens
CALLS = ((1, 1024), (64, 8192))  # whole calls, with launches
LAUNCHES, APART = 2, 7  # of a call: attention and a merge; of staged formats with a launch for every form
YOUNG = 64  # keys of a sequence that are not sealed, at most
_HALF_RATE = ("bits", "integer", "convert")  # 64 lanes a clock on sm80 to sm90, half of what is issued
# Of all programs a multiprocessor, where so many fit at once and elsewhere; keys of a program at least.
_WARPS, _OTHER_WARPS, _LEAST = 12, 24, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A decode kernel's loop as counted."""

    kv: str
    instructions: int  # of a warp
    around: int  # before the loop and after it, whichever side of a branch they are on
    barriers: int
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
            around=row["instructions"] - row["loop_instructions"],
            barriers=row["kinds"].get("barrier", 0),
            half_rate=sum(row["kinds"].get(kind, 0) for kind in _HALF_RATE),
            awaits_loads=row["awaited_loads"] > 0,
        )


class Machine(NamedTuple):
    """What is not counted."""

    cycles: float  # that an instruction of a lone warp takes
    latency_us: float  # of memory
    sharpness: float  # of the transition between limits: high where the largest alone decides
    barrier: float  # cycles that a barrier costs, for every doubling of the warps that meet there


# Least squares over 101 tiles of decode timed on an H200 (benchmarks/results/tiles-h200.json).
MEASURED = Machine(cycles=3.6, latency_us=0.39, sharpness=4.0, barrier=86.0)  # D151


# What a call over bf16 at 1 x 1,024 took on an H200 (11 us) beside the 9.1 us that its attention takes here:
# its merge, launched and run. Taken for every other small launch.
LAUNCH_US = 1.9  # D393


def tile_us(loop: Loop, card: Card, machine: Machine, programs: int) -> float:
    """What a tile takes each of `programs` that run at once.

    The longest of: a program alone, with the memory that it waits for; what its multiprocessor issues, and
    its pipe of half rate; the bytes of all. Where two are near each other, more than either.
    """
    clock = card.clock_ghz * 1e3  # a microsecond
    waits = loop.awaits_loads + (loop.tiles_under_way < 1)
    alone = _alone_us(loop, card, machine) + waits * machine.latency_us
    if loop.tiles_under_way >= 1:
        alone = max(alone, machine.latency_us / loop.tiles_under_way)
    beside = -(-programs // card.multiprocessors)
    issued = beside * loop.warps * max(loop.instructions, 2 * loop.half_rate) / SCHEDULERS / clock
    read = programs * loop.keys * loop.key_bytes / (READ_SHARE * card.bandwidth) * 1e6
    limits = alone, issued, read
    return max(limits) * sum((x / max(limits)) ** machine.sharpness for x in limits) ** (
        1 / machine.sharpness
    )


def _alone_us(loop: Loop, card: Card, machine: Machine) -> float:
    """A round of a lone program, but for memory."""
    barriers = loop.barriers * machine.barrier * log2(loop.warps)
    return (loop.instructions * machine.cycles + barriers) / (card.clock_ghz * 1e3)


def attention_us(
    loop: Loop, card: Card, machine: Machine, sequences: int, depth: int, warps: int | None = None
) -> float:
    """One launch over sequences of one length, cut into programs as kvq cuts them, in waves.

    `warps`: of all programs a multiprocessor, if not as many as kvq takes.
    """
    if warps is None:
        warps = _WARPS if loop.programs_at_once * loop.warps >= _WARPS else _OTHER_WARPS
    keys = sequences * depth * KV_HEADS
    programs = min(card.multiprocessors * warps // loop.warps, max(keys // _LEAST, sequences * KV_HEADS))
    tiles = keys / programs / loop.keys + 0.5  # the last one is full or not
    around = loop.around * machine.cycles / (card.clock_ghz * 1e3) + machine.latency_us
    at_once = card.multiprocessors * loop.programs_at_once
    waves = [at_once] * (programs // at_once) + [programs % at_once]
    return sum(tiles * tile_us(loop, card, machine, n) + around for n in waves if n)


def call_us(
    loop: Loop, card: Card, machine: Machine, size: tuple[int, int], launches: int = LAUNCHES
) -> float:
    """A whole call over sequences of one length: attention and other launches. `size`: sequences, depth."""
    return attention_us(loop, card, machine, *size) + (launches - 1) * LAUNCH_US


def apart_us(loop: Loop, young: Loop, card: Card, machine: Machine, size: tuple[int, int]) -> float:
    """A call over a staged format with a launch for each form: `young` goes over keys that are not sealed."""
    others = attention_us(young, card, machine, size[0], YOUNG)
    return call_us(loop, card, machine, size, APART) + others - LAUNCH_US


def calls(plain: dict[str, Loop], staged: dict[str, Loop], card: Card) -> Table:
    """Whole calls, by format; of staged formats with one launch for all forms, before with one for each."""
    table = [["format", *(f"{n} x {depth:,}, us" for n, depth in CALLS), "before"]]
    for kv, loop in {**plain, **staged}.items():
        times = [f"{call_us(loop, card, MEASURED, size):.0f}" for size in CALLS]
        has_both = kv in staged and kv in plain and "bf16" in plain
        before = [apart_us(plain[kv], plain["bf16"], card, MEASURED, x) for x in CALLS] if has_both else []
        table.append([kv, *times, ", ".join(f"{us:.0f}" for us in before)])
    return table


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
    found = rows(loops, card, MEASURED)
    times = [["format", "workload", "ms", "share of read bandwidth"]]
    for row in found:
        shown = [f"{row[key]:.{digits}f}" for key, digits in (("ms_median", 3), ("fraction_of_bandwidth", 2))]
        times.append([row["kv"], row["shape"], *shown])
    judged = [["goal", "modelled", "expected"]]
    for goal in goals.GOALS:
        if (value := goal.value(found)) is not None:
            judged.append([goal.judged(found)["goal"], f"{value:.2f}", expected(goal, value)])
    return [times, judged]


def expected(goal: goals.Goal, value: float) -> str:
    """Yes if it is met by more than the model's error, no if it is missed by more, else open."""
    over = value / goal.bound if goal.at_most else goal.bound / value
    return "yes" if over * (1 + ERROR) <= 1 else "no" if over > 1 + ERROR else "open"


def _card(name: str) -> Card:
    return next(card for card in CARDS if card.name == name)


def main() -> None:
    """Print what the model says of counted kernels."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions.model")
    parser.add_argument("counted", type=Path, help="of python -m benchmarks.instructions --out")
    parser.add_argument("--card", default="h200", choices=[card.name for card in CARDS])
    options = parser.parse_args()
    card, counted = _card(options.card), json.loads(options.counted.read_text())
    mine, staged = (
        {
            row["kv"]: Loop.of(row)
            for row in counted["rows"]
            if wanted.items() <= row.items() and "error" not in row
        }
        for wanted in (
            {"device": card.device, "kernel": "attend decode"},
            {"device": card.device, "kernel": "attend staged decode"},
        )
    )
    print(f"{card.name}, Triton {counted['triton']}: a model's results, not measured\n")
    for found in (*tables([*mine.values()], card), calls(mine, staged, card)):
        print(f"{markdown(found)}\n")


if __name__ == "__main__":
    main()
