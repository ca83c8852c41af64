"""Markdown tables of rows."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.real.records import Row

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
_COLUMNS: dict[str, dict[str, Cell]] = {"wikitext": _TEXT, "essays": _TEXT}


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
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in settings.items()
    )
