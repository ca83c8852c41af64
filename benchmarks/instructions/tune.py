"""Tiles of attention by what compiled kernels are counted to take, and a model of the time that makes.

    python -m benchmarks.instructions.tune --sm 80,89,90 --kv bf16,int4_g64 --out build/tiles.json
    python -m benchmarks.instructions.tune --out build/tiles.json --write-table

Needs no GPU. Another shape takes the present one's place only where the model has it no slower on any card of
the device and in any workload, and faster by `CLEARLY` in one of these cases, and if it takes no more
instructions or leaves a third of all cards' slots free: what the model says of latency is unsure. The present
one stays where they can't be told apart.

What `--out` has of the same kernel and version of Triton is not compiled again.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.instructions.cards import CARDS, Card
from benchmarks.instructions.counting import SPILLED, Asked, counted
from benchmarks.instructions.kernels import kernels
from benchmarks.instructions.model import MEASURED, SHAPES, Loop, attention_us, tile_us
from kvq.bench.kernels.tune import Cost, axes, search, write_table
from kvq.formats import KVRecipe
from kvq.formats.recipe import LayerFormats
from kvq.kernels.attend.triton.kernel import attend_kernel
from kvq.kernels.gpu import shapes
from kvq.kernels.gpu.shapes import TileShape

CLEARLY = 0.05  # less time
BUDGET = 2 / 3  # of a card's slots for a key, that a shape of more instructions than the present one may take
_WORKLOADS = SHAPES | {"decode 64 x 1024": (64, 1024)}
_COUNTED_STAGES = (5, 7)  # one more is the same loop, and with fewer nothing is under way
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """What a shape is chosen for."""

    kind: str
    kv: str
    dim: int
    device: str
    block_size: int

    @property
    def formats(self) -> LayerFormats:
        """Of a layer."""
        return KVRecipe.uniform(self.kv, [(self.dim, self.dim)]).layers[0]

    @property
    def key(self) -> str:
        """Its entry's."""
        name = shapes.format_name(self.formats)
        return shapes.table_key(self.kind, name, self.dim, self.device, self.block_size)

    @property
    def present(self) -> TileShape:
        """What it is cut by today."""
        return shapes.shape_for(self.kind, self.formats, self.device, self.block_size)

    def asked(self, tile: TileShape) -> Asked:
        """The kernel cut by that."""
        dims = self.dim, self.dim
        with shapes.using(self.key, tile):
            found = kernels(self.kv, torch.bfloat16, dims, self.device, block_size=self.block_size)
        return Asked(self.kv, f"attend {self.kind}", self.device, *found[f"attend {self.kind}"], dims)


def tried(place: Place, known: list[Row]) -> list[Row]:
    """Rows of all shapes that the search tries; one of them is chosen."""
    present, rows = place.present, {}

    def cost(tile: TileShape) -> Cost | None:
        if any(_is_looser(tile, other, row) for other, row in rows.items()):
            return None
        row = rows[tile] = _row(place, tile, known)
        print("." if row["us"] else "x", end="", file=sys.stderr, flush=True)
        return (sum(row["us"].values()), row["instructions_a_key"]) if row["us"] else None

    search(axes(place.kind, _COUNTED_STAGES), present, cost)
    best = chosen(list(rows.values()), rows[present])
    return [row | {"present": row is rows[present], "chosen": row is best} for row in rows.values()]


def _is_looser(tile: TileShape, other: TileShape, row: Row) -> bool:
    """Whether it only allows registers that the same shape was counted not to take."""
    return replace(tile, registers=None) == other and (tile.registers or 0) >= row.get("registers", 256)


def chosen(rows: list[Row], present: Row) -> Row:
    """The present shape's row, unless it is refused or another is clearly faster whatever is assumed."""
    better = [row for row in rows if _is_better(row["us"], present["us"]) and _is_within_budget(row, present)]
    by_time: Callable[[Row], Cost] = lambda row: (sum(row["us"].values()), row["instructions_a_key"])  # noqa: E731
    return min(better, key=by_time, default=present)


def _is_within_budget(row: Row, present: Row) -> bool:
    least = BUDGET * min(row["slots_a_key"].values())
    return not present["us"] or row["instructions_a_key"] <= max(least, present["instructions_a_key"])


def _is_better(us: dict[str, float], present: dict[str, float]) -> bool:
    """No slower whatever is assumed, and clearly faster in one case at least; or what is there is refused."""
    if not us or not present:
        return bool(us)
    shares = [us[name] / present[name] for name in present]
    return max(shares) <= 1 and min(shares) < 1 - CLEARLY


def _row(place: Place, tile: TileShape, known: list[Row]) -> Row:
    name = asdict(place) | {"tile": asdict(tile)}
    name |= {"triton": triton.__version__, "kernel": getattr(attend_kernel, "cache_key", "interpreted")[:16]}
    row = next((row for row in known if name.items() <= row.items()), None)
    row = row or counted(place.asked(tile)) | name
    return row | {"us": {} if _is_refused(row) else _times(place.kind, row)}


def _is_refused(row: Row) -> bool:
    """It doesn't compile, doesn't fit, has no loop over keys, or spills more than little in it."""
    if "error" in row or "instructions_a_key" not in row:
        return True
    spilled = row["kinds"].get("spill", 0) / row["loop_instructions"]
    return row["programs_at_once"] < 1 or spilled > SPILLED


def _times(kind: str, row: Row) -> dict[str, float]:
    """Modelled microseconds, by card and workload."""
    loop, found = Loop.of(row), {}
    for card in CARDS:
        if card.device == row["device"]:
            if kind == "extend":
                found[card.name] = _extend_us(loop, row["rows"], card)
            else:
                times = {x: attention_us(loop, card, MEASURED, *size) for x, size in _WORKLOADS.items()}
                found |= {f"{card.name}, {x}": us for x, us in times.items()}
    return found


def _extend_us(loop: Loop, rows: int, card: Card) -> float:
    """Of a million query rows times keys: instructions and latency, as tiles of rows share what is read."""
    programs = card.multiprocessors * loop.programs_at_once
    us = tile_us(replace(loop, key_bytes=0), card, MEASURED, programs)
    return 1e6 * us / (programs * rows * loop.keys)


def main() -> None:
    """Count, choose, and keep what the command line asks for."""
    options = parsed()
    known = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    found: dict[str, TileShape] = {}
    for place in places(options):
        rows = tried(place, known)
        known = [row for row in known if not asdict(place).items() <= row.items()] + rows
        options.out.write_text(json.dumps({"triton": triton.__version__, "rows": known}, indent=1) + "\n")
        best = next(row for row in rows if row["chosen"])
        found[place.key] = TileShape(**best["tile"])
        print(f" {told(rows, best)}", file=sys.stderr, flush=True)
    if options.write_table:
        write_table(list(found.items()), origin="counted")


def told(rows: list[Row], best: Row) -> str:
    """A line about what was chosen, and what the model has for the present shape and for the best."""
    present = next(row for row in rows if row["present"])
    line = f"{best['kind']} {best['kv']} {best['dim']} {best['device']} blocks {best['block_size']}: "
    return line + "; ".join(
        f"{name} {_figures(row)}" for name, row in (("present", present), ("chosen", best))
    )


def _figures(row: Row) -> str:
    tile = row["tile"]
    us = ", ".join(f"{x:.0f}" for x in row["us"].values()) or "refused"
    sizes = (
        f"{tile['rows']}x{tile['keys']}, {tile['warps']} warps, {tile['stages']} stages, {tile['registers']}"
    )
    return f"{sizes}: {row.get('instructions_a_key')} a key, us {us}"


def places(options: argparse.Namespace) -> Iterator[Place]:
    """All that are asked for."""
    for sm, kv, dim, kind, size in product(
        options.sm, options.kv, options.dims, options.kinds, options.blocks
    ):
        yield Place(kind, kv, int(dim), f"sm{sm}", int(size))


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lists = {
        "--sm": ("80,89,90", "compute capabilities"),
        "--kv": ("bf16,fp8,int8,int4_g64,int4_g32,k8v4", "KV formats"),
        "--dims": ("128", "head dimensions"),
        "--kinds": ("decode,extend", "what to tune"),
        "--blocks": ("64,32", "tokens of a block"),
    }
    for name, (default, text) in lists.items():
        parser.add_argument(name, default=default, type=lambda told: told.split(","), help=text)
    parser.add_argument("--out", type=Path, required=True, help="JSON of all that was tried")
    parser.add_argument("--write-table", action="store_true", help="into kvq/kernels/gpu/shapes.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
