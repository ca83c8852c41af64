"""Two results side by side: what changed from one to the other."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from kvq.errors import ConfigError
from kvq.evals.bootstrap import Z95
from kvq.evals.gates import IDENTITIES, identity
from kvq.evals.sections import row_keys

_SIZES = ("bits_per_element", "kv_bytes_per_token", "compression")  # in every row, measured or not
_RESULT_KEYS = ("kvq_version", "date", "device", "command", "model", "model_digest", "text", "text_digest",
                "context", "versions")  # fmt: skip
_QUALITY = ("perplexity", "perplexity_change", "kl_mean", "kl_p999", "top1_agreement", "kv_bytes_per_token",
            "seconds")  # fmt: skip
_FIGURES = {  # section of a result -> what is compared of its rows; every number, where it isn't named
    "rows": _QUALITY,
    "generation": ("same_tokens_mean", "identical"),
    "attention": ("error_mean", "error_max"),
    "needle_summary": ("retrieved", "token_accuracy"),
    "needle": ("retrieved", "token_accuracy"),
    "lm_eval": ("value",),
}
_SAME = {  # what must agree for figures to be comparable
    "text_digest": "the texts differ",
    "held_out_digest": "the texts measured on differ",
    "model_digest": "the models differ",
    "context": "the windows differ in tokens",
    "device": "the devices differ: times can't be compared, and figures may differ in their last digits",
    "seed": "the seeds differ",
    "resamples": "the intervals are of different numbers of resamples",
}
_PLANS = {  # the same of what only some results have
    "needle_plan": "the needles were asked for differently",
    "lm_eval_plan": "lm-eval's options differ",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One figure of one row in both results."""

    section: str  # "rows", or a further task's key
    kv: str
    where: str  # what else tells the row from others of its format
    figure: str
    a: float
    b: float
    difference: float  # b - a
    a_interval: tuple[float, float] | None
    b_interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `compare` found."""

    warnings: list[str]
    only_in_a: list[str]  # rows
    only_in_b: list[str]
    differences: list[Difference]

    def to_json(self) -> dict[str, Any]:
        """The keys that `kvq compare --json` writes beside its rows."""
        found = asdict(self)
        del found["differences"]
        return found


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a file that `kvq perplexity --json` or `kvq eval --json` wrote.

    Raises:
        ConfigError: missing, not JSON, or another command's.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # syntax, encoding, huge numbers
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise ConfigError(f"{path} is no result of kvq: it is no JSON object with rows")
    rows = result["rows"]
    if not (
        set(_RESULT_KEYS) <= set(result) and rows and all(map(_is_row, rows)) and set(_SIZES) <= set(rows[0])
    ):
        told = f" (its command: {result['command']})" if result.get("command") else ""
        raise ConfigError(f"{path} is no result of kvq perplexity or kvq eval{told}; write one with --json")
    if not _tasks_fit(result):
        raise ConfigError(f"{path} is damaged: the rows of its tasks are missing or malformed; measure again")
    return result


def _tasks_fit(result: Mapping[str, Any]) -> bool:
    """True if every task of a result names rows that are there."""
    tasks = result.get("tasks", [])
    if not isinstance(tasks, list) or not all(isinstance(task, dict) and "key" in task for task in tasks):
        return False
    found = [result.get(str(key)) for key in row_keys(result)]
    return all(isinstance(rows, list) and all(map(_is_row, rows)) for rows in found)


def _is_row(row: object) -> bool:
    """True for an object with a format, and identities and intervals that can be read."""
    if not isinstance(row, dict) or not isinstance(row.get("kv"), str):
        return False
    intervals = row.get("intervals") or {}
    if not isinstance(intervals, dict) or any(isinstance(row.get(key), list | dict) for key in IDENTITIES):
        return False
    return all(
        span is None or (isinstance(span, list) and len(span) == 2 and all(map(_is_number, span)))
        for span in intervals.values()
    )


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compare results of one kind, row by row.

    Raises:
        ConfigError: one is of kvq perplexity, the other of kvq eval.
    """
    if kind(a) != kind(b):
        raise ConfigError(
            f"one result is of kvq {kind(a)}, the other of kvq {kind(b)}; compare two of a kind"
        )
    only_a: list[str] = []
    only_b: list[str] = []
    differences: list[Difference] = []
    for section in _section_keys(a, b):
        rows_a, rows_b = (_by_identity(one.get(section, [])) for one in (a, b))
        only_a += _only(section, rows_a, rows_b)
        only_b += _only(section, rows_b, rows_a)
        for key in rows_a:
            if key in rows_b:
                differences += _differences(section, rows_a[key], rows_b[key])
    return Comparison(
        warnings=_warnings(a, b),
        only_in_a=list(dict.fromkeys(only_a)),
        only_in_b=list(dict.fromkeys(only_b)),
        differences=differences,
    )


def kind(result: Mapping[str, Any]) -> str:
    """The command that a result is of."""
    return "eval" if "tasks" in result else "perplexity"


def _section_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`rows`, and the keys of further tasks of either."""
    return list(dict.fromkeys(["rows", *row_keys(a), *row_keys(b)]))


def _by_identity(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {tuple(row.get(key) for key in ("kv", *IDENTITIES)): row for row in rows}


def _only(
    section: str, rows: Mapping[tuple[Any, ...], Any], others: Mapping[tuple[Any, ...], Any]
) -> list[str]:
    """What one result has and the other has not: a whole task, a format, or single rows of one."""
    if not others:
        return [f"the task {section}"] if rows else []
    formats = {key[0] for key in others}
    found = []
    for key in rows:
        where = identity(dict(zip(IDENTITIES, key[1:], strict=True)))
        if key[0] not in formats or (key not in others and section == "rows"):
            found.append(", ".join(filter(None, (key[0], where if section == "rows" else ""))))
        elif key not in others:
            found.append(f"{section} of {key[0]}, {where}")
    return found


def _differences(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    names = _FIGURES.get(section) or [name for name in a if name not in ("kv", *IDENTITIES)]
    return [
        Difference(
            section=section,
            kv=a["kv"],
            where=identity(a),
            figure=name,
            a=a[name],
            b=b[name],
            difference=b[name] - a[name],
            a_interval=_interval(a, name),
            b_interval=_interval(b, name),
        )
        for name in names
        if _is_number(a.get(name)) and _is_number(b.get(name))
    ]


def _interval(row: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """A figure's bounds at 95%: among the intervals, beside the figure, or from its standard error."""
    low, high, error = (row.get(key) for key in (f"{name}_low", f"{name}_high", "stderr"))
    if _is_number(low) and _is_number(high):
        return low, high
    if name == "value" and _is_number(error):
        return row[name] - Z95 * error, row[name] + Z95 * error
    return (row.get("intervals") or {}).get(name)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name} is not complete: its measurement was interrupted, and rows or windows are missing"
        for name, one in (("A", a), ("B", b))
        if one.get("complete") is False
    ]
    for key, words in _SAME.items():
        if a.get(key) != b.get(key):
            shown = [_shown(key, one) for one in (a, b)]
            found.append(f"{words}: {shown[0]} against {shown[1]}")
    for key, words in _PLANS.items():
        if key in a and key in b and a[key] != b[key]:
            found.append(f"{words}: {a[key]} against {b[key]}")
    tokens = [one["rows"][0].get("tokens") for one in (a, b)]
    if tokens[0] != tokens[1]:
        found.append(f"the numbers of predicted tokens differ: {tokens[0]} against {tokens[1]}")
    bases = [_baseline(one) for one in (a, b)]
    if bases[0] != bases[1]:
        found.append(f"the baselines differ: {bases[0]} against {bases[1]}")
    return found


def _shown(key: str, result: Mapping[str, Any]) -> str:
    if not key.endswith("_digest"):
        return str(result.get(key))
    return f"{result[key.removesuffix('_digest')]} ({str(result[key])[:12]})"


def _baseline(result: Mapping[str, Any]) -> str:
    return str(result["rows"][0]["kv"])
