"""Rows as tables for people, plain or in Markdown."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]
Table = list[list[str]]  # the first line has the headings


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, Table]]:
    """A device's loops beside what bandwidth leaves, their kinds, other kernels, what doesn't compile."""
    for device in dict.fromkeys(row["device"] for row in rows):
        mine = [row for row in rows if row["device"] == device]
        done = [row for row in mine if "error" not in row]
        loops = [row for row in done if "instructions_a_key" in row]
        name = f"{device}, Triton {mine[0]['triton']}"
        if loops:
            yield f"{name}: loops over keys", _loops(loops)
            yield f"{name}: their instructions a key by kind", _kinds(loops, _a_key)
        if others := [row for row in done if row not in loops]:
            yield f"{name}: other kernels", _others(others)
        if broken := [row for row in mine if "error" in row]:
            told = [[row["kv"], row["kernel"], row["error"]] for row in broken]
            yield f"{name}: not compiled", [["format", "kernel", "the compiler's error"], *told]


def _loops(rows: Sequence[Row]) -> Table:
    cards = list(rows[0]["slots_a_key"])
    names = [
        "format",
        "kernel",
        "rows x keys",
        "bytes a key",
        "instructions a key",
        *(f"slots {x}" for x in cards),
    ]
    found = [[*names, *_HELD, "buffers", "waits", "tiles under way", "bytes a load"]]
    for row in rows:
        line = [row["kv"], row["kernel"], f"{row['rows']} x {row['keys']}", f"{row['key_bytes']}"]
        line += [f"{row['instructions_a_key']:.1f}", *(f"{row['slots_a_key'][card]:.0f}" for card in cards)]
        waits = " ".join(map(str, row["waits"])) or "-"
        copied = [f"{row['buffers']}", f"{waits} of {row['copy_groups']}", f"{row['tiles_under_way']:g}"]
        found.append([*line, *_held(row), *copied, _loads(row)])
    return found


def _others(rows: Sequence[Row]) -> Table:
    found = [["format", "kernel", "instructions", "in a loop of products", *_HELD, "bytes a load"]]
    for row in rows:
        counts = [f"{row['instructions']}", f"{row['loop_instructions'] or '-'}"]
        found.append([row["kv"], row["kernel"], *counts, *_held(row), _loads(row)])
    return found


_HELD = ["warps", "registers", "spilled bytes", "shared memory", "programs at once"]


def _held(row: Row) -> list[str]:
    shared = f"{row['shared'] / 1024:.1f} KB"
    return [f"{row['warps']}", f"{row['registers']}", f"{row['stack']}", shared, f"{row['programs_at_once']}"]


def _loads(row: Row) -> str:
    return ", ".join(f"{count} {name}" for name, count in row["loads"].items()) or "-"


def _kinds(rows: Sequence[Row], figure: Callable[[Row, str], float]) -> Table:
    kinds = sorted(
        {kind for row in rows for kind in row["kinds"]}, key=lambda kind: -rows[0]["kinds"].get(kind, 0)
    )
    found = [["format", "kernel", *kinds]]
    for row in rows:
        found.append([row["kv"], row["kernel"], *(f"{figure(row, kind):.1f}" for kind in kinds)])
    return found


def _a_key(row: Row, kind: str) -> float:
    return float(row["kinds"].get(kind, 0) * row["warps"] / row["keys"])


def plain(table: Table) -> str:
    """Columns under each other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


def markdown(table: Table) -> str:
    """As documents have it; figures on the right."""
    sides = ["--:" if _is_figure(column[1]) else "---" for column in zip(*table, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [table[0], sides, *table[1:]])


def _is_figure(cell: str) -> bool:
    return cell.removesuffix(" KB").replace(".", "", 1).isdigit()
