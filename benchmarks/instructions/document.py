"""`docs/instructions.md`: what every kernel takes on every card, from the budgets, and the table of tiles.

python -m benchmarks.instructions.document
"""

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.instructions import budgets
from benchmarks.instructions.cards import CARDS, slots
from benchmarks.instructions.counting import DIM, key_bytes
from benchmarks.instructions.table import Table, markdown
from kvq import fileio
from kvq.kernels.gpu import shapes

FILE = Path(__file__).parents[2] / "docs" / "instructions.md"
_LOOPS = "attend decode", "attend staged decode", "attend extend"
_NAMES = "instructions", "registers", "spilled bytes", "programs at once", "tiles under way"
_HEAD = """# Instructions of every kernel

Counted in kernels compiled without a GPU, with Triton {versions}: the
days when some were last counted. Nothing here is timed. What a column means is told
[beside the kernels](kernels.md#instructions-the-other-limit). Made by

```sh
python -m benchmarks.instructions --write-budgets   # with each version of Triton
python -m benchmarks.instructions.document          # budgets.json and shapes.json as this page
```

32 query heads and 8 KV heads of dimension 128 in blocks of 64, queries in bf16. Loops over keys:
instructions of all warps of a program for one key of one KV head; slots are those of the card while its
memory delivers that key. Other kernels: all instructions of a warp. Where two figures stand, the first is of
Triton {first}, the second of {second}.
"""
_SHARES = """## Query heads a KV head

A tile of decode has 16 rows, which 1 to 16 query heads of a KV head fill. Its loop takes the same whatever
their number is: with 16 heads a head costs a sixteenth of what it costs alone.
"""
_TILES = """## Tiles

`kvq/kernels/gpu/shapes.json`: `kvq bench tune` on a GPU writes *timed* entries (those of sm90 on an H200);
*counted* ones would be chosen by a model from counts (`python -m benchmarks.instructions.tune`). What is not
in the table follows rules in `kvq/kernels/gpu/shapes.py`.
"""


def rendered() -> str:
    """The page."""
    known, days = budgets.read(), budgets.days()
    versions = sorted(known)
    told = " and ".join(f"{version} ({days.get(version, 'no date')})" for version in versions)
    parts = [_HEAD.format(versions=told, first=versions[0], second=versions[-1])]
    for device in dict.fromkeys(card.device for card in CARDS):
        names = ", ".join(card.name for card in CARDS if card.device == device)
        parts.append(f"## {device}: {names}\n")
        for title, table in _tables(known, device):
            parts += [f"{title}:\n", f"{markdown(table)}\n"]
    parts += [_SHARES, f"{markdown(_shares(known))}\n", _TILES, f"{markdown(_tiles())}\n"]
    return "\n".join(parts)


def _tables(known: budgets.Budgets, device: str) -> Iterator[tuple[str, Table]]:
    """Loops over keys beside slots, those over latents, then all other kernels."""
    found = {name: own for name, own in _figures(known, device).items() if not name[0].endswith(" heads")}
    loops = {name: own for name, own in found.items() if name[0] in _LOOPS}
    cards = [card.name for card in CARDS if card.device == device]
    table = [["kernel", "format", "bytes a key", *(f"slots {name}" for name in cards), *_NAMES]]
    for (kernel, kv), own in loops.items():
        size = key_bytes(kv, (DIM, DIM))
        free = slots(device, size)
        table.append([kernel, kv, f"{size}", *(f"{free[name]:.0f}" for name in cards), *own[: len(_NAMES)]])
    yield "Loops over keys", table
    latents = {name: own for name, own in found.items() if name[0].startswith("attend_latent")}
    if latents:
        yield (
            "Loops over latents",
            [["kernel", "format", *_NAMES], *([*name, *latents[name][: len(_NAMES)]] for name in latents)],
        )
    around = [[*name, *own[5:]] for name, own in loops.items() if len(own) > len(_NAMES)]
    if around:
        yield (
            "Before and after loops over keys, where counted",
            [["kernel", "format", *budgets.AROUND], *around],
        )
    rest = [[*name, *own[:4]] for name, own in found.items() if name not in loops | latents]
    yield "Other kernels", [["kernel", "format", *_NAMES[:4]], *rest]


def _figures(known: budgets.Budgets, device: str) -> dict[tuple[str, str], list[str]]:
    """A cell for each column, by kernel and format."""
    versions = [
        {(name, kv): own for name, of in known[version].items() for kv, own in of.items()}
        for version in sorted(known)
    ]
    found = {}
    for name, kv in sorted({name for version in versions for name in version}):
        owner, _, kernel = name.partition(" ")
        if owner == device:
            rows = [version.get((name, kv)) for version in versions]
            count = max(len(row) for row in rows if row is not None)
            found[kernel, kv or "-"] = [_cell(rows, i) for i in range(count)]
    return found


def _cell(rows: list[list[float] | None], index: int) -> str:
    figures = ["-" if row is None or index >= len(row) else f"{row[index]:g}" for row in rows]
    return figures[0] if len(set(figures)) == 1 else " / ".join(figures)


def _shares(known: budgets.Budgets) -> Table:
    """Decode by the query heads that share a KV head, where that was counted."""
    table = [["device", "format", "query heads a KV head", *_NAMES]]
    for device in dict.fromkeys(card.device for card in CARDS):
        for (kernel, kv), own in _figures(known, device).items():
            if kernel.startswith("attend decode, ") and kernel.endswith(" heads"):
                table.append([device, kv, kernel.split()[2], *own[: len(_NAMES)]])
    return [table[0], *sorted(table[1:], key=lambda line: (line[0], line[1], int(line[2])))]


def _tiles() -> Table:
    """The table's entries."""
    table = [["for", "rows x keys", "warps", "stages", "registers at most", "from"]]
    for key, own in json.loads(shapes.TABLE.read_text())["shapes"].items():
        if not key.startswith("linear"):
            tile = f"{own['rows']} x {own['keys']}"
            most = str(own.get("registers") or "-")
            table.append(
                [key, tile, f"{own['warps']}", f"{own['stages']}", most, own.get(shapes.ORIGIN, "timed")]
            )
    return table


if __name__ == "__main__":
    fileio.write_text(FILE, rendered())
