"""lm-eval's metrics as gates and tables see them, which need no lm-eval."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq.evals.gates import Gate

Row = Mapping[str, Any]  # fields of lm_eval_tasks.TaskRow

CHANGE = "_change"  # behind a metric's name: less the baseline's value


def metric_figures(metrics: Sequence[str]) -> list[str]:
    """What gates may name of metrics."""
    return [figure for metric in metrics for figure in (metric, metric + CHANGE)]


def changes(rows: Sequence[Row]) -> list[float | None]:
    """What each row's value is more than the first format's, where both are numbers."""
    found = []
    for row in rows:
        base = next(one["value"] for one in rows if _place(one) == _place(row))
        known = base is not None and row["value"] is not None
        found.append(row["value"] - base if known else None)
    return found


def gate_rows(rows: Sequence[Row], gate: Gate) -> list[dict[str, Any]]:
    """The rows that a gate concerns, with its figure by name.

    A task that lacks the metric is not among them, unless the gate names the task: then it fails.
    """
    task = (gate.task or "").partition(":")[2]
    metric = gate.figure
    found = []
    for row, change in zip(rows, changes(rows), strict=True):
        if metric not in (row["metric"], row["metric"] + CHANGE):
            continue
        if task in ("", row["task"]) and gate.filter in (None, row["filter"]):
            found.append({**row, metric: row["value"] if metric == row["metric"] else change})
    return found


def _place(row: Row) -> tuple[str, str, str]:
    return row["task"], row["metric"], row["filter"]
