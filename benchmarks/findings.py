"""Findings of a trial of the server: requirements and results, row by row."""

import sys
from pathlib import Path
from typing import Any

import torch

from kvq.evals.report.results import envelope, write_json

RESULTS = Path(__file__).resolve().parent / "results"
Rows = list[dict[str, Any]]
NO_BOUNDS = ("--max-queue", "100000", "--max-wait", "100000", "--max-kv-pressure", "1")


def finding(what: str, found: Any, asked: str, holds: bool, **more: Any) -> dict[str, Any]:
    """One row."""
    return {"what": what, "found": found, "asked": asked, "holds": bool(holds), **more}


def report(path: Path, rows: Rows, **more: Any) -> bool:
    """Write rows and print them; True if all hold. `more` goes beside the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, envelope(sys.argv, torch.device("cpu"), rows, more))
    for row in rows:
        holds = "holds" if row["holds"] else "FALLS SHORT"
        print(f"  {holds:<12}{row['what']}: {row['found']} ({row['asked']})", flush=True)
        for line in row.get("first", ()):
            print(f"    {line}")
    return all(row["holds"] for row in rows)
