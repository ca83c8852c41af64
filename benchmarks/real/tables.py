"""Markdown tables of rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.real.hidden import BASELINE
from benchmarks.real.paired import difference
from benchmarks.real.records import STORED, Row

Cell = Callable[[Row], str]


def _number(name: str, form: str) -> Cell:
    return lambda row: "" if row.get(name) is None else format(row[name], form)


def _interval(name: str, form: str) -> Cell:
    def cell(row: Row) -> str:
        value, span = row.get(name), (row.get("intervals") or {}).get(name)
        if value is None:
            return ""
        told = f" ({span[0]:{form}} to {span[1]:{form}})" if span else ""
        return f"{value:{form}}{told}"

    return cell


_SIZES: dict[str, Cell] = {
    "bits": _number("bits_per_element", ".3f"),
    "held at 1,024": _number("bits_held_1024", ".2f"),
    "held at 8,192": _number("bits_held_8192", ".2f"),
}
_TEXT: dict[str, Cell] = {
    "mean KL": _interval("kl_mean", ".5f"),
    "KL 99.9%": _number("kl_p999", ".3f"),
    "perplexity": _number("perplexity", ".3f"),
    "change": _interval("perplexity_change", "+.2%"),
    "same top token": _interval("top1_agreement", ".2%"),
}


def _against(row: Row) -> str:
    found = row.get("against_baseline")
    if found is None:
        return ""
    low, high = found["interval"]
    return (
        f"{found['difference']:+.1%} ({low:+.1%} to {high:+.1%}), {found['gained']} gained, "
        f"{found['lost']} lost, p {found['p']:.2g}"
    )


_TASK: dict[str, Cell] = {
    "right": lambda row: f"{row['hits']} of {row['trials']}",
    "share": _interval("share", ".1%"),
    "against the baseline": _against,
}
_COLUMNS: dict[str, dict[str, Cell]] = {
    "wikitext": _TEXT,
    "essays": _TEXT,
    "humaneval": _TASK
    | {
        "same top token in solutions": _number("canonical_top1_agreement", ".2%"),
        "KL there": _number("canonical_kl_mean", ".5f"),
    },
    "retrieval": _TASK,
    "checks": {
        "measured KL": _number("kl_mean", ".5f"),
        "change": _number("perplexity_change", "+.2%"),
        "measured": lambda row: row.get("measured", ""),
        "the check said": lambda row: row.get("said", ""),
        "its KL": _number("check_kl_mean", ".5f"),
        "worst layer": _number("check_worst_layer", ".1%"),
        "seconds": _number("check_s", ".1f"),
    },
    "rivals": _TEXT | {"logits": lambda row: row["logits"]},
}


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with what outcomes of the same trials say against the baseline's."""

    def key(row: Row) -> str:
        return f"{row['model']} {row['part']} {_told(row['settings'])}"

    exact = {key(row): row["outcomes"] for row in rows if row["kv"] == BASELINE and "outcomes" in row}
    return [
        row | {"against_baseline": asdict(difference(row["outcomes"], exact[key(row)]))}
        if "outcomes" in row and row["kv"] != BASELINE and key(row) in exact
        else row
        for row in rows
    ]


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each part and its settings, a line for each model and format."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["part"], _told(row["settings"])), []).append(row)
    for (part, told), some in groups.items():
        yield f"\n{part}: {told}\n"
        yield from table(some, _SIZES | _COLUMNS[part])


def table(rows: Sequence[Row], columns: dict[str, Cell]) -> Iterator[str]:
    """Lines of one table."""
    yield f"| model | KV | {' | '.join(columns)} |"
    yield f"|---|---|{'--:|' * len(columns)}"
    for row in rows:
        cells = " | ".join(cell(row) for cell in columns.values())
        yield f"| {row['model']} | `{row['kv']}` | {cells} |"


def _told(settings: dict[str, Any]) -> str:
    """Return what all formats have in common."""
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in settings.items()
        if name != STORED
    )
