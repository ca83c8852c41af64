"""All parts of a run as one result, and as a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import goals, record
from benchmarks.gpu.parts import Part

_ENVELOPE = ("kvq_version", "commit", "date", "device", "versions", "is_rehearsal")
_SHOWN = (  # key, unit, format: of the figures that rows may hold
    ("ms_median", "ms", "{:.4f}"),
    ("us_median", "us", "{:.2f}"),
    ("gb_per_s", "GB/s", "{:,.0f}"),
    ("read_gb_per_s", "GB/s read", "{:,.0f}"),
    ("fraction_of_bandwidth", "of bandwidth", "{:.1%}"),
    ("fraction_of_limit", "of the limit", "{:.1%}"),
    ("speedup_over_bf16", "x bf16", "{:.2f}"),
    ("output_tokens_per_s", "tokens/s", "{:,.0f}"),
    ("gpu_idle_share", "idle", "{:.1%}"),
    ("kernels_per_layer", "kernels a layer", "{:.1f}"),
    ("max_relative_error", "error", "{:.1e}"),
)


def collect(folder: Path, parts: Sequence[Part], statuses: Mapping[str, str]) -> dict[str, Any]:
    """One result of all parts' files, those of a run before this one included.

    `statuses`: of parts that have ended, or were skipped.
    """
    result: dict[str, Any] = {"parts": {}, "goals": [], "rows": []}
    for part in parts:
        state = record.read(folder / f"{part.name}.json")
        if state is None:
            result["parts"][part.name] = {"status": statuses.get(part.name, "not begun")}
            continue
        result = {name: state.get(name) for name in _ENVELOPE} | result
        result["parts"][part.name] = {
            "status": statuses.get(part.name, state["status"]),
            "seconds": state["seconds"],
            "done": len(state["done"]),
            "failed": state["failed"],
            "running": state["running"],
        }
        result["rows"] += [{"part": part.name, **row} for row in state["rows"]]
    if not result.get("is_rehearsal"):
        result["goals"] = goals.judged(result["rows"])
    return result


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result as a table, what failed and what the goals say last."""
    shown = [line for line in map(_row, result["rows"]) if line]
    if result.get("is_rehearsal"):
        shown.insert(0, "A REHEARSAL ON A CPU: the figures mean nothing")
    for name, part in result["parts"].items():
        shown.append(f"part {name:12s} {part['status']}, {part.get('seconds', 0):.0f} s")
        shown += [f"    FAILED {case}: {reason}" for case, reason in part.get("failed", {}).items()]
    shown += [_goal(goal) for goal in result["goals"] if goal["value"] is not None]
    return shown


def is_good(result: Mapping[str, Any]) -> bool:
    """True if nothing failed, no test either."""
    parts = result["parts"].values()
    tested = all(row["passed"] for row in result["rows"] if "passed" in row)
    return tested and not any(part.get("failed") or part["status"] == "broken" for part in parts)


def _row(row: Mapping[str, Any]) -> str:
    if "launch" in row:  # of `warm`: only what failed is worth a line
        return f"{row['launch']}: {row['error']}" if row["error"] else ""
    if "passed" in row:
        return "\n".join(
            [f"TESTS {'passed' if row['passed'] else 'FAILED'}: {row['summary']}", *row["failures"]]
        )
    figures = [
        f"{pattern.format(row[key])} {unit}" for key, unit, pattern in _SHOWN if row.get(key) is not None
    ]
    if "graph" in row and "step" in row["case"]:
        figures.append("graph" if row["graph"] else f"NO GRAPH: {row.get('graph_reason')}")
    names = [str(row[key]) for key in ("name", "kv", "weights", "sampling") if key in row]
    return f"{row['case']:32s} {' '.join(names):28s} {'  '.join(figures)}"


def _goal(goal: Mapping[str, Any]) -> str:
    return f"{'met   ' if goal['is_met'] else 'MISSED'} {goal['goal']}: {goal['value']:.3g}"
