"""Files that `kvq perplexity --json` or `kvq eval --json` wrote, or somebody else: read field by field."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from kvq import strict_json
from kvq.errors import ConfigError, first_lines
from kvq.evals.gates import IDENTITIES
from kvq.evals.sections import row_keys

SIZES = ("bits_per_element", "kv_bytes_per_token", "compression")  # in every row, measured or not
QUALITY = ("perplexity", "perplexity_change", "kl_mean", "kl_p999", "top1_agreement", "kv_bytes_per_token",
           "seconds")  # fmt: skip
FIGURES = {  # section of a result -> what is compared of its rows; every number, where it isn't named
    "rows": QUALITY,
    "generation": ("same_tokens_mean", "identical"),
    "attention": ("error_mean", "error_max"),
    "needle_summary": ("retrieved", "token_accuracy"),
    "needle": ("retrieved", "token_accuracy"),
    "lm_eval": ("value",),
}
_TEXTS = ("kvq_version", "date", "device", "command", "model", "model_digest", "text", "text_digest")
_REQUIRED = (*_TEXTS, "context", "versions")
_MORE_TEXTS = ("commit", "held_out", "held_out_digest")
_MORE_NUMBERS = ("seed", "resamples")
_MAX_TEXT = 10_000  # characters
_LARGEST = 1e300  # of any figure; the difference of two is finite, too


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a result whose fields are all of the types that kvq writes.

    Raises:
        ConfigError: missing, not JSON, another command's, or a field of another type; the message names it.
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
    if not (set(_REQUIRED) <= set(result) and rows and all(_has_sizes(row) for row in rows)):
        told = f" (its command: {result['command']!s:.200})" if result.get("command") else ""
        raise ConfigError(f"{path} is no result of kvq perplexity or kvq eval{told}; write one with --json")
    try:
        _check(result)
    except _Misfit as error:
        raise ConfigError(f"{path} is damaged: {error}; measure again") from error
    return result


def is_figure(value: object) -> TypeGuard[float]:
    """True for a number that can be compared."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


class _Misfit(Exception):
    """A field that is not as kvq writes it."""


def _need(holds: bool, field: str, wanted: str) -> None:
    if not holds:
        raise _Misfit(f"{field} must be {wanted}")


def _has_sizes(row: object) -> bool:
    return isinstance(row, dict) and set(SIZES) <= set(row)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(result: Mapping[str, Any]) -> None:
    for name in _TEXTS:
        _need(_is_text(result[name]), name, f"a text of at most {_MAX_TEXT} characters")
    for name in _MORE_TEXTS:
        _need(result.get(name) is None or _is_text(result[name]), name, "a text or null")
    for name in _MORE_NUMBERS:
        _need(result.get(name) is None or _is_whole(result[name]), name, "a whole number or null")
    _need(_is_whole(result["context"]), "context", "a whole number of tokens")
    _need(isinstance(result["versions"], dict), "versions", "an object")
    _need(isinstance(result.get("complete", True), bool), "complete", "true or false")
    tasks = result.get("tasks", [])
    _need(isinstance(tasks, list), "tasks", "a list")
    for index, task in enumerate(tasks):
        _need(isinstance(task, dict) and _is_text(task.get("key")), f"tasks[{index}]", "an object with a key")
    for key in dict.fromkeys(["rows", *row_keys(result)]):
        rows = result.get(key)
        _need(isinstance(rows, list), key, "a list of rows, as the tasks say")
        for index, row in enumerate(rows or []):
            _check_row(f"{key}[{index}]", row, (*SIZES, *QUALITY) if key == "rows" else FIGURES.get(key, ()))


def _check_row(where: str, row: Any, figures: Iterable[str]) -> None:
    _need(isinstance(row, dict), where, "an object")
    _need(_is_text(row.get("kv")), f"{where}.kv", "a text")
    for name in IDENTITIES:
        value = row.get(name)
        _need(value is None or _is_text(value) or is_figure(value), f"{where}.{name}", "a text or a number")
    for name in figures:
        _need(row.get(name) is None or is_figure(row[name]), f"{where}.{name}", "a number or null")
    tokens = row.get("tokens")
    _need(tokens is None or _is_whole(tokens), f"{where}.tokens", "a whole number")
    intervals = row.get("intervals") or {}
    _need(isinstance(intervals, dict), f"{where}.intervals", "an object")
    for name, span in intervals.items():
        is_span = isinstance(span, list) and len(span) == 2 and all(map(is_figure, span))
        _need(span is None or is_span, f"{where}.intervals.{name:.40}", "two numbers or null")
