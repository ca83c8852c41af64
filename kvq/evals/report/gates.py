"""Gates: limits that a measurement must meet, such as `kl_mean<0.01`, for continuous integration.

    [FORMAT:][TASK.]FIGURE OPERATOR NUMBER[UNIT]

Units are % for shares and changes; nats, mnats or bits for divergences; bits per element; B, KB or KiB per
token; s, ms or min; and x for compression. Failures are reported in the unit of the gate. A limit is refused
if no share can reach it or if it looks like a percentage without %.

A gate passes if all of its rows meet the limit: the rows of the named format, or of every quantized format if
none is named. Missing values and NaN fail. For lm-eval, `lm_eval.acc` refers to the metric in every task that
reports it, and `lm_eval:TASK.acc` to the metric in one task; `acc,FILTER` selects a filter, and `acc_change`
is the difference from the baseline.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from kvq.errors import ConfigError, nearest

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    **{"<=": operator.le, ">=": operator.ge},
    **{"<": operator.lt, ">": operator.gt},
}
_LARGEST = 1e300  # for any figure, so that the difference of two is finite
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_GATE = re.compile(
    r"\s*(?:(?P<kv>(?!\s*lm_eval:)[^:<>=]+(?:\+(?:sinks|recent)=\d+)*):)?\s*(?:(?P<task>lm_eval:[^<>=\s]+|[a-z_]\w*)\.)?"
    r"(?P<figure>[A-Za-z_]\w*)(?:,(?P<filter>[\w-]+))?\s*"
    rf"(?P<operator><=|>=|<|>)\s*(?P<limit>{_NUMBER})\s*(?P<unit>%|[A-Za-z/]+)?\s*"
)
_SHARE = {"%": 0.01}
_NATS = {"nats": 1.0, "mnats": 1e-3, "bits": math.log(2)}
_SECONDS = {"s": 1.0, "ms": 1e-3, "min": 60.0}
_SHARES = (  # also the bounds of their intervals
    *("top1_agreement", "top5_agreement", "identical", "retrieved", "token_accuracy", "exact_keys"),
)
_CHANGE = "perplexity_change"
_PLAIN = ("perplexity", "documents", "prompts", "new_tokens", "same_tokens", "trials", "layer")
_UNITS: dict[str, dict[str, float]] = {  # keyed by the prefix of a figure's name; other figures are shares
    "kl_": _NATS,
    _CHANGE: _SHARE,
    **{name: {} for name in _PLAIN},
    **{name: {"bits": 1.0, "b/el": 1.0} for name in ("bits_per_element", "bits_held")},
    "kv_bytes_per_token": {"B": 1.0, "KB": 1e3, "KiB": 1024.0},
    "compression": {"x": 1.0},
    "seconds": _SECONDS,
    "tokens": {"tokens": 1.0},
}
IDENTITIES = ("attention_window", "task", "metric", "filter", "length", "depth", "layer")  # besides `kv`
_FROM_BASE = "_change"  # suffix of an lm-eval metric: difference from the baseline
_EXAMPLES = (
    "kl_mean<0.01, perplexity_change<=1%, int4:top1_agreement>0.9, needle.retrieved>=0.95, "
    "lm_eval:TASK.acc>=0.6"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One limit. `kv`, `task` and `filter` are None if the expression does not name them."""

    text: str
    kv: str | None
    task: str | None
    figure: str
    filter: str | None  # of an lm-eval metric: applied to answers before they are scored
    operator: str
    limit: float  # in the figure's own unit
    unit: str  # as written; "" for the figure's own unit
    scale: float  # of `unit`, in the figure's own unit

    def tell(self, value: float) -> str:
        """Format a figure in the unit of the limit."""
        return f"{value / self.scale:.6g}{'' if self.unit in ('', '%', 'x') else ' '}{self.unit}"

    def holds(self, value: object) -> bool:
        """Return True if a value is a number and meets the limit."""
        return is_figure(value) and _OPERATORS[self.operator](value, self.limit)


def parse_gate(text: str) -> Gate:
    """Parse one gate expression.

    Raises:
        ConfigError: the text is not a gate; the message shows examples.
    """
    match = _GATE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--gate {text!r} is not [FORMAT:][TASK.]FIGURE<NUMBER; such as {_EXAMPLES}")
    unit = match["unit"] or ""
    scale = _scale(text, match["figure"], unit)
    limit = float(match["limit"]) * scale
    if not math.isfinite(limit):
        raise ConfigError(f"--gate {text!r}: the limit must be a finite number")
    _check_limit(match, limit)
    words: dict[str, Any] = match.groupdict() | {"kv": match["kv"] and match["kv"].strip()}
    return Gate(**words | {"text": text.strip(), "limit": limit, "unit": unit, "scale": scale})


def _scale(text: str, figure: str, unit: str) -> float:
    """Return the value of a unit in terms of the figure's own unit."""
    if not unit:
        return 1.0
    units = next((known for name, known in _UNITS.items() if figure.startswith(name)), _SHARE)
    if unit not in units:
        allowed = f"given in {', '.join(units)} or plain" if units else "a plain number"
        raise ConfigError(f"--gate {text!r}: {figure} is {allowed}, got {unit!r}")
    return units[unit]


def _check_limit(match: re.Match[str], limit: float) -> None:  # D39: an ambiguous limit is refused
    """Raise ConfigError if a limit is impossible for a share, or might be meant as a percentage."""
    figure, number = match["figure"], match["limit"]
    text, start = match.string.strip(), match.string[: match.start("limit")].strip()
    if figure.startswith(_SHARES) and not 0 <= limit <= 1:
        hint = f"; did you mean {start}{number}%?" if not match["unit"] and 1 < limit <= 100 else ""
        raise ConfigError(f"--gate {text!r}: {figure} is a share, 0 to 1 or 0% to 100%{hint}")
    if figure.startswith(_CHANGE) and not match["unit"] and abs(limit) >= 1:
        raise ConfigError(
            f"--gate {text!r} allows a change of {limit:.0%}; write {start}{number}% or "
            f"{start}{100 * limit:g}%, whichever you mean"
        )


def check_gate(
    gate: Gate, *, figures: Mapping[str, Sequence[str]], all_tasks: Sequence[str], formats: Mapping[str, bool]
) -> str:
    """Return the task whose rows a gate applies to; this check runs before any measurement.

    `figures`: the figures measured by each task that will run; if the gate names no task, the first task with
    the figure is chosen. `formats`: whether each format is quantized.

    Raises:
        ConfigError: the task isn't run, or the figure or format is unknown.
    """
    if gate.kv is not None and gate.kv not in formats:
        hint = nearest(gate.kv, formats) or ";"
        raise ConfigError(f"--gate {gate.text!r}: {gate.kv!r} is not measured{hint} {', '.join(formats)} are")
    if gate.kv is None and not any(formats.values()):
        raise ConfigError(
            f"--gate {gate.text!r} is about quantized formats, and {', '.join(formats)} are none; "
            f"name the format: {next(iter(formats))}:{gate.text}"
        )
    if gate.task is not None and gate.task not in figures:
        if gate.task.partition(":")[0] in set(all_tasks) - set(figures):
            raise ConfigError(f"--gate {gate.text!r}: the task isn't run; add {gate.task} to --tasks")
        hint = nearest(gate.task, figures) or ";"
        raise ConfigError(
            f"--gate {gate.text!r}: there is no task {gate.task!r}{hint} {', '.join(figures)} are run"
        )
    tasks = figures if gate.task is None else {gate.task: figures[gate.task]}
    found = [task for task, names in tasks.items() if gate.figure in names]
    if not found:
        known = list(dict.fromkeys(itertools.chain(*tasks.values())))
        raise ConfigError(
            f"--gate {gate.text!r}: no task that is run measures {gate.figure!r}"
            f"{nearest(gate.figure, known) or ';'} there are {', '.join(known)}"
        )
    if gate.filter is not None and not found[0].startswith("lm_eval"):
        raise ConfigError(f"--gate {gate.text!r}: {gate.figure} has no filters; leave out ,{gate.filter}")
    return found[0]


def failures(
    gate: Gate, rows: Sequence[Mapping[str, Any]], formats: Mapping[str, bool]
) -> list[dict[str, Any]]:
    """Return the rows that fail a gate, as JSON. `rows`: of the gate's task; `formats`: as in `check_gate`.

    Each entry has `kv`, `where` (which of the format's rows), `value`, and `told`: a description of the
    failure, with the figure and the limit in the gate's unit.
    """
    kvs = [kv for kv, quantized in formats.items() if (quantized if gate.kv is None else kv == gate.kv)]
    concerned = [(row, figure(row, gate.figure)) for row in rows if row["kv"] in kvs]
    if not concerned:
        return [missing(gate, "not measured")]
    return [_failure(gate, row, value) for row, value in concerned if not gate.holds(value)]


def _failure(gate: Gate, row: Mapping[str, Any], value: object) -> dict[str, Any]:
    kv, where, number = row["kv"], identity(row), value if is_figure(value) else None
    who = " ".join(filter(None, (kv, where)))
    told = "not a number" if number is None else gate.tell(number)
    told = f"{who}: {told}, the limit is {gate.tell(gate.limit)}"
    return {"kv": kv, "where": where, "value": number, "has_row": True, "told": told}


def missing(gate: Gate, reason: str) -> dict[str, Any]:
    """Return the failure of a gate that has no rows, with the reason as `where`."""
    kv = gate.kv or "every quantized format"
    return {"kv": kv, "where": reason, "value": None, "has_row": False, "told": f"{kv}: {reason}"}


def figure(row: Mapping[str, Any], name: str) -> object:
    """Return the figure `name` of a row; `NAME_low` and `NAME_high` are the bounds of NAME's interval."""
    if name in row:
        return row[name]
    base, _, bound = name.rpartition("_")
    span = (row.get("intervals") or {}).get(base)
    return None if span is None or bound not in ("low", "high") else span[bound == "high"]


def identity(row: Mapping[str, Any]) -> str:
    """Return a text that distinguishes a row from other rows of the same format."""
    return ", ".join(
        f"{key} {row[key]}"
        for key in IDENTITIES
        if row.get(key) is not None and (key, row[key]) != ("filter", "none")
    )


def is_figure(value: object) -> TypeGuard[float]:
    """Return True for a finite number that can be compared, and False for anything else."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def metric_figures(metrics: Sequence[str]) -> list[str]:
    """Return the names that gates use for lm-eval's metrics."""
    return [figure for metric in metrics for figure in (metric, metric + _FROM_BASE)]


def changes(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return each lm-eval row's difference from the first format's row, or None if either is not a number."""
    found = []
    for row in rows:
        base = next(one["value"] for one in rows if _place(one) == _place(row))
        known = base is not None and row["value"] is not None
        found.append(row["value"] - base if known else None)
    return found


def metric_rows(rows: Sequence[Mapping[str, Any]], gate: Gate) -> list[dict[str, Any]]:
    """Return the lm-eval rows that a gate applies to, with the figure added under its name.

    Tasks without the metric yield no rows; a gate that names such a task fails.
    """
    task = (gate.task or "").partition(":")[2]
    metric = gate.figure
    found = []
    for row, change in zip(rows, changes(rows), strict=True):
        if metric not in (row["metric"], row["metric"] + _FROM_BASE):
            continue
        if task in ("", row["task"]) and gate.filter in (None, row["filter"]):
            found.append({**row, metric: row["value"] if metric == row["metric"] else change})
    return found


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["task"], row["metric"], row["filter"]
