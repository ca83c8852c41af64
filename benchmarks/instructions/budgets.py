"""What kernels may ask for at most: `budgets.json`, for the versions of Triton that it was counted with."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvq import fileio

FILE = Path(__file__).with_name("budgets.json")
SLACK = 0.03  # of instructions and registers
_MOST = ("instructions_a_key", "instructions", "registers")  # a loop's length is its instructions a key
_FORMAT_VERSION = 1


def read() -> dict[str, dict[str, dict[str, Any]]]:
    """Budgets by Triton's version and a row's name."""
    known: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text())["budgets"]
    return known


def name(row: dict[str, Any]) -> str:
    """How a row is found again."""
    return " ".join(filter(None, (row["device"], row["kernel"], row["kv"])))


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Take these rows for what is allowed from now on; others stay as they were."""
    known = read() if FILE.exists() else {}
    for row in rows:
        if "error" not in row:
            known.setdefault(row["triton"], {})[name(row)] = budget(row)
    kept = {version: dict(sorted(known[version].items())) for version in sorted(known)}
    text = json.dumps({"format_version": _FORMAT_VERSION, "budgets": kept})
    fileio.write_text(FILE, text.replace("}, ", "},\n").replace(": {", ":\n{") + "\n")


def budget(row: dict[str, Any]) -> dict[str, Any]:
    """What of a row is held to."""
    most = [
        key for key in _MOST if key in row and not (key == "instructions" and "instructions_a_key" in row)
    ]
    return {
        **{key: row[key] for key in most},
        "stack": row["stack"],
        "tiles_under_way": row["tiles_under_way"],
    }


def broken(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Where rows ask for more than allowed, spill more, or have fewer tiles under way; or have no budget.

    Only for versions of Triton that there are budgets for.
    """
    known, found = read(), []
    for row in rows:
        allowed = known.get(row["triton"])
        if allowed is None:
            continue
        if name(row) not in allowed:
            found.append(f"{name(row)} has no budget")
        elif "error" in row:
            found.append(f"{name(row)} does not compile: {row['error']}")
        else:
            found += [f"{name(row)}: {text}" for text in _beyond(row, allowed[name(row)])]
    return found


def _beyond(row: dict[str, Any], allowed: dict[str, Any]) -> list[str]:
    found = [
        f"{key} {row.get(key)}, allowed {allowed[key]} and {SLACK:.0%}"
        for key in _MOST
        if key in allowed and row.get(key, 1e9) > allowed[key] * (1 + SLACK)
    ]
    if row["stack"] > allowed["stack"]:
        found.append(f"{row['stack']} bytes spilled, allowed {allowed['stack']}")
    if row["tiles_under_way"] < allowed["tiles_under_way"]:
        found.append(f"{row['tiles_under_way']} tiles under way, not {allowed['tiles_under_way']}")
    return found
