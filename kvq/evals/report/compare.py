"""Comparison of two results of `kvq perplexity --json` or `kvq eval --json`, whose fields are validated."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from kvq import strict_json
from kvq.arguments import fits
from kvq.errors import ConfigError, first_lines
from kvq.evals.report.bootstrap import Z95
from kvq.evals.report.gates import IDENTITIES, identity, is_figure
from kvq.evals.report.sections import row_keys

SIZES = ("bits_per_element", "kv_bytes_per_token", "compression")  # in every row, even if it was not measured
QUALITY = ("perplexity", "perplexity_change", "kl_mean", "kl_p999", "top1_agreement", "kv_bytes_per_token",
           "seconds")  # fmt: skip
FIGURES = {  # section of a result -> figures compared in its rows; in other sections, all numbers
    "rows": QUALITY,
    "generation": ("same_tokens_mean", "identical"),
    "attention": ("error_mean", "error_max"),
    "needle_summary": ("retrieved", "token_accuracy"),
    "needle": ("retrieved", "token_accuracy"),
    "lm_eval": ("value",),
}
_REQUIRED = {
    **dict.fromkeys(("kvq_version", "date", "device", "command", "model", "model_digest", "text"), str),
    **{"text_digest": str, "context": int, "versions": dict},
}
_FIELDS: dict[str, Any] = {
    **_REQUIRED,
    **dict.fromkeys(("commit", "held_out", "held_out_digest"), str | None),
    **dict.fromkeys(("seed", "resamples"), int | None),
    **{"complete": bool | None, "tasks": list | None, "cautions": list[str] | None},
}
_ROW: dict[str, Any] = {
    **{"kv": str, "tokens": int | None, "intervals": dict | None},
    **dict.fromkeys(IDENTITIES, str | float | None),
}
_WORDS: dict[Any, str] = {
    **{str: "a text", int: "a whole number", float: "a number", bool: "true or false"},
    **{dict: "an object", list: "a list", list[str]: "a list of texts", type(None): "null"},
}
_MAX_TEXT = 10_000  # characters
_SAME = {  # fields that must be equal for figures to be comparable
    "text_digest": "the texts differ",
    "held_out_digest": "the texts measured on differ",
    "model_digest": "the models differ",
    "context": "the windows differ in tokens",
    "device": "the devices differ: times can't be compared, and figures may differ in their last digits",
    "seed": "the seeds differ",
    "resamples": "the intervals are of different numbers of resamples",
}
_PLANS = {  # such fields that are present only in some results
    "needle_plan": "the needles were asked for differently",
    "lm_eval_plan": "lm-eval's options differ",
}


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a result, and check that all fields have the types that kvq writes.

    Raises:
        ConfigError: the file is missing, not JSON, or from another command, or a field, named in the message,
        has the wrong type.
    """
    try:
        result = strict_json.read(Path(path))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {first_lines(error)}") from error
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise ConfigError(f"{path} is no result of kvq: it is no JSON object with rows")
    rows = result["rows"]
    have_sizes = all(isinstance(row, dict) and set(SIZES) <= set(row) for row in rows)
    if not (_REQUIRED.keys() <= result.keys() and rows and have_sizes):
        told = f" (its command: {result['command']!s:.200})" if result.get("command") else ""
        raise ConfigError(f"{path} is no result of kvq perplexity or kvq eval{told}; write one with --json")
    try:
        _check(result)
    except _WrongField as error:
        raise ConfigError(f"{path} is damaged: {error}; measure again") from error
    return result


class _WrongField(Exception):
    """Error: a field has a value that kvq would not write."""


def _need(value: object, hint: Any, field: str) -> None:
    """Raise _WrongField unless a value has the type `hint` and is small enough to be shown and compared."""
    is_whole = len(value) <= _MAX_TEXT if isinstance(value, str) else True
    if not (fits(value, hint) and is_whole and (not isinstance(value, float) or is_figure(value))):
        words = " or ".join(_WORDS[kind] for kind in get_args(hint) or (hint,))
        raise _WrongField(
            f"{field} must be {words}" + ("" if is_whole else f" of at most {_MAX_TEXT} characters")
        )


def _check(result: Mapping[str, Any]) -> None:
    for name, hint in _FIELDS.items():
        _need(result.get(name), hint, name)
    for index, task in enumerate(result.get("tasks") or []):
        if not isinstance(task, dict) or not isinstance(task.get("key"), str):
            raise _WrongField(f"tasks[{index}] must be an object with a key")
    for key in dict.fromkeys(["rows", *row_keys(result)]):
        _need(result.get(key), list, key)
        for index, row in enumerate(result[key]):
            _check_row(f"{key}[{index}]", row, (*SIZES, *QUALITY) if key == "rows" else FIGURES.get(key, ()))


def _check_row(where: str, row: Any, figures: Iterable[str]) -> None:
    _need(row, dict, where)
    for name, hint in (_ROW | dict.fromkeys(figures, float | None)).items():
        _need(row.get(name), hint, f"{where}.{name}")
    for name, span in (row.get("intervals") or {}).items():
        _need(span, list | None, f"{where}.intervals.{name:.40}")
        for bound in () if span is None else span if len(span) == 2 else [None]:
            _need(bound, float, f"{where}.intervals.{name:.40}")


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two results of the same kind row by row, and return JSON.

    `rows`: figures of rows present in both results: `section` ("rows", or the key of another task), `kv`,
    `where` (which of the format's rows), `figure`, `a`, `b`, `difference` (b - a), and bounds. `only_in_a`,
    `only_in_b`: rows present in one result. `warnings`: reasons why figures are not comparable.

    Raises:
        ConfigError: one result is from kvq perplexity, and the other is from kvq eval.
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
    """Return the name of the command that wrote a result."""
    return "eval" if "tasks" in result else "perplexity"


def _keys(result: Mapping[str, Any]) -> list[str]:
    """Return `rows` and the keys of other tasks."""
    return ["rows", *row_keys(result)]


def _rows(result: Mapping[str, Any], section: str) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return a section's rows keyed by identity, but only if the section was validated on reading."""
    rows = result.get(section, []) if section in _keys(result) else []
    return {tuple(row.get(key) for key in ("kv", *IDENTITIES)): row for row in rows}


def _only(
    section: str, rows: Mapping[tuple[Any, ...], Any], others: Mapping[tuple[Any, ...], Any]
) -> list[str]:
    """Describe the entries present in only one result: a task, a format, or single rows of a format."""
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
    """Return a figure's 95% bounds, from separate fields, its standard error or the intervals."""
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
