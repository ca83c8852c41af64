"""What kernels may ask for at most: `budgets.json`, for the versions of Triton that it was counted with."""

import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvq import fileio

FILE = Path(__file__).with_name("budgets.json")
SLACK = 0.03  # of instructions and registers
COLUMNS = ("instructions", "registers", "stack", "programs_at_once", "tiles_under_way")
AROUND = ("prologue", "epilogue")  # further columns of kernels with a loop over keys, where they were counted
_FORMAT_VERSION = 1

Row = dict[str, Any]
# D150: a budget per kernel and version of Triton
Budgets = dict[str, dict[str, dict[str, list[float]]]]  # Triton's version, device and kernel, format


def read(file: Path = FILE) -> Budgets:
    """Figures in the order of COLUMNS."""
    kept = json.loads(file.read_text())
    assert kept["format_version"] == _FORMAT_VERSION, kept["format_version"]
    assert kept["columns"] == list(COLUMNS), kept["columns"]
    known: Budgets = kept["budgets"]
    return known


def days(file: Path = FILE) -> dict[str, str]:
    """When something was last counted with each version of Triton."""
    known: dict[str, str] = json.loads(file.read_text()).get("counted", {})
    return known


def write(rows: Sequence[Row], file: Path = FILE) -> None:
    """Take these rows for what is allowed from now on; others stay as they were."""
    known, dates = (read(file), days(file)) if file.exists() else ({}, {})
    dates |= {row["triton"]: datetime.datetime.now(datetime.UTC).date().isoformat() for row in rows}
    for row in rows:
        if "error" not in row:
            kernels = known.setdefault(row["triton"], {})
            kernels.setdefault(_kernel(row), {})[row["kv"]] = figures(row)
    lines = [f'{{"format_version": {_FORMAT_VERSION}, "columns": {json.dumps(COLUMNS)},']
    lines += [f'"counted": {json.dumps(dates, sort_keys=True)},', '"budgets": {']
    for version in sorted(known):
        kernels = known[version]
        told = [
            f"{json.dumps(name)}: {json.dumps(kernels[name], sort_keys=True)}" for name in sorted(kernels)
        ]
        lines += [f'"{version}": {{', ",\n".join(told), "},"]
    lines[-1] = lines[-1].rstrip(",")
    fileio.write_text(file, "\n".join([*lines, "}}"]) + "\n")


def figures(row: Row) -> list[float]:
    """A row's, as COLUMNS and AROUND; instructions are those a key, where a loop goes over keys."""
    counted = row | {"instructions": row.get("instructions_a_key", row["instructions"])}
    return [counted[column] for column in (*COLUMNS, *AROUND) if column not in AROUND or column in counted]


def broken(rows: Iterable[Row], known: Budgets) -> list[str]:
    """Where rows take more than allowed, spill more, fit or copy fewer at once, fail, or have no budget.

    Rows of a version of Triton that there are no budgets for are not judged.
    """
    found = []
    for row in rows:
        if row["triton"] not in known:
            continue
        name = f"{_kernel(row)} {row['kv']}"
        allowed = known[row["triton"]].get(_kernel(row), {}).get(row["kv"])
        if allowed is None:
            found += [] if "error" in row else [f"{name}: there is no budget"]
        elif "error" in row:
            found.append(f"{name}: does not compile: {row['error']}")
        else:
            found += [f"{name}: {text}" for text in _beyond(figures(row), allowed)]
    return found


def _kernel(row: Row) -> str:
    return f"{row['device']} {row['kernel']}"


def _beyond(own: list[float], allowed: list[float]) -> list[str]:
    slack = 1 + SLACK
    most = [allowed[0] * slack, allowed[1] * slack, allowed[2]]
    over = [i for i in range(3) if own[i] > most[i]]
    under = [i for i in (3, 4) if own[i] < allowed[i]]
    over += [i for i in range(5, min(len(own), len(allowed))) if own[i] > allowed[i] * slack]
    names = COLUMNS + AROUND
    return [f"{names[i]} {own[i]:g}, budget {allowed[i]:g}" for i in over + under]
