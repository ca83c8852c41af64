"""Comparison of two results."""

from collections.abc import Mapping
from typing import Any

from kvq.errors import ConfigError
from kvq.evals.report.bootstrap import Z95
from kvq.evals.report.gates import IDENTITIES, identity, is_figure
from kvq.evals.report.result_file import FIGURES
from kvq.evals.report.sections import row_keys

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


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compare results of one kind, row by row; returns JSON.

    `rows`: figures of rows that both have: `section` ("rows", or a further task's key), `kv`, `where` (what
    else tells the row from others of its format), `figure`, `a`, `b`, `difference` (b - a), and their bounds.
    `only_in_a`, `only_in_b`: other rows. `warnings`: reasons why figures can't be compared.

    Raises:
        ConfigError: one is of kvq perplexity, the other of kvq eval.
    """
    if kind(a) != kind(b):
        raise ConfigError(
            f"one result is of kvq {kind(a)}, the other of kvq {kind(b)}; compare two of a kind"
        )
    only: dict[str, list[str]] = {"a": [], "b": []}
    differences: list[dict[str, Any]] = []
    for section in dict.fromkeys([*_keys(a), *_keys(b)]):
        rows_a, rows_b = (_rows(one, section) for one in (a, b))
        only["a"] += _only(section, rows_a, rows_b)
        only["b"] += _only(section, rows_b, rows_a)
        for key in rows_a:
            if key in rows_b:
                differences += _differences(section, rows_a[key], rows_b[key])
    found = {f"only_in_{name}": list(dict.fromkeys(rows)) for name, rows in only.items()}
    return {"warnings": _warnings(a, b), **found, "rows": differences}


def kind(result: Mapping[str, Any]) -> str:
    """Return the command that wrote a result."""
    return "eval" if "tasks" in result else "perplexity"


def _keys(result: Mapping[str, Any]) -> list[str]:
    """Return `rows`, and the keys of further tasks."""
    return ["rows", *row_keys(result)]


def _rows(result: Mapping[str, Any], section: str) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return a section's rows by identity, if a task names it: only those were checked when read."""
    rows = result.get(section, []) if section in _keys(result) else []
    return {tuple(row.get(key) for key in ("kv", *IDENTITIES)): row for row in rows}


def _only(
    section: str, rows: Mapping[tuple[Any, ...], Any], others: Mapping[tuple[Any, ...], Any]
) -> list[str]:
    """Return what only one result has: a whole task, a format, or single rows of one."""
    if not others:
        return [f"the task {section}"] if rows else []
    formats = {key[0] for key in others}
    found = []
    for key in rows:
        where = identity(dict(zip(IDENTITIES, key[1:], strict=True)))
        if key[0] not in formats or (key not in others and section == "rows"):
            found.append(", ".join(filter(None, (str(key[0]), where if section == "rows" else ""))))
        elif key not in others:
            found.append(f"{section} of {key[0]}, {where}")
    return found


def _differences(section: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = FIGURES.get(section) or [name for name in a if name not in ("kv", *IDENTITIES)]
    about = {"section": section, "kv": a["kv"], "where": identity(a)}
    return [
        {
            **about,
            **{"figure": name, "a": a[name], "b": b[name], "difference": b[name] - a[name]},
            **{"a_interval": _interval(a, name), "b_interval": _interval(b, name)},
        }
        for name in names
        if is_figure(a.get(name)) and is_figure(b.get(name))
    ]


def _interval(row: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Return a figure's 95% bounds: among the intervals, beside it, or from its standard error."""
    low, high, error = (row.get(key) for key in (f"{name}_low", f"{name}_high", "stderr"))
    if is_figure(low) and is_figure(high):
        return low, high
    if name == "value" and is_figure(error):
        return row[name] - Z95 * error, row[name] + Z95 * error
    return (row.get("intervals") or {}).get(name)


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name} is not complete: its measurement was interrupted, and rows or windows are missing"
        for name, one in (("A", a), ("B", b))
        if one.get("complete") is False
    ]
    found += [f"{name}: {line}" for name, one in (("A", a), ("B", b)) for line in one.get("cautions") or ()]
    for key, words in _SAME.items():
        if a.get(key) != b.get(key):
            shown = [_shown(key, one) for one in (a, b)]
            found.append(f"{words}: {shown[0]} against {shown[1]}")
    for key, words in _PLANS.items():
        if key in a and key in b and a[key] != b[key]:
            found.append(f"{words}: {a[key]} against {b[key]}")
    first = [one["rows"][0] for one in (a, b)]
    for key, words in (("tokens", "the numbers of predicted tokens differ"), ("kv", "the baselines differ")):
        if first[0].get(key) != first[1].get(key):
            found.append(f"{words}: {first[0].get(key)} against {first[1].get(key)}")
    return found


def _shown(key: str, result: Mapping[str, Any]) -> str:
    if not key.endswith("_digest"):
        return str(result.get(key))
    return f"{result.get(key.removesuffix('_digest'))} ({str(result.get(key))[:12]})"
