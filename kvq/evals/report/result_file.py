"""Result files of `kvq perplexity --json` and `kvq eval --json`, checked field by field."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from kvq import strict_json
from kvq.arguments import fits
from kvq.errors import ConfigError, first_lines
from kvq.evals.report.gates import IDENTITIES, is_figure
from kvq.evals.report.sections import row_keys

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
    if not (_REQUIRED.keys() <= result.keys() and rows and all(_has_sizes(row) for row in rows)):
        told = f" (its command: {result['command']!s:.200})" if result.get("command") else ""
        raise ConfigError(f"{path} is no result of kvq perplexity or kvq eval{told}; write one with --json")
    try:
        _check(result)
    except _WrongField as error:
        raise ConfigError(f"{path} is damaged: {error}; measure again") from error
    return result


class _WrongField(Exception):
    """Field with a value that kvq would not write."""


def _has_sizes(row: object) -> bool:
    return isinstance(row, dict) and set(SIZES) <= set(row)


def _need(value: object, hint: Any, field: str) -> None:
    """Raise _WrongField unless a value is of a type, and of a size that can be shown and compared."""
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
