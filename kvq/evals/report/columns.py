"""Tables as text cells, for the terminal and for pages: their columns and number formats."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Key of a row, dots leading further in -> head, and number format or what makes a text; "" for texts.
Columns = Mapping[str, tuple[str, Any]]


def table(rows: Iterable[Mapping[str, Any]], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells; None is a dash."""
    heads = [head for head, _ in columns.values()]
    return heads, [[_cell(row, key, style) for key, (_, style) in columns.items()] for row in rows]


def _cell(row: Any, key: str, style: Any) -> str:
    for part in key.split("."):
        row = row[int(part)] if isinstance(row, list) else row[part]
    if row is None:
        return "-"
    return style(row) if callable(style) else format(row, style)


def span(form: str) -> Callable[[tuple[float, float]], str]:
    """Return a function that writes both bounds in a number format."""
    return lambda bounds: f"{bounds[0]:{form}} .. {bounds[1]:{form}}"


def bits(value: float) -> str:
    """Write a number to three digits, without zeros at the end."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


SIZES: Columns = {  # what a format takes
    "bits_per_element": ("bits", bits),
    "kv_bytes_per_token": ("bytes/token", ",.0f"),
    "compression": ("vs bf16", "{:.2f}x".format),
}


def sizes(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns of sizes, with those of a sequence of the context if it holds more."""
    if all(row.get("bits_held", 0) < row["bits_per_element"] + 0.005 for row in rows):
        return SIZES
    held: Columns = {"bits_held": ("bits held", bits)}
    return {"bits_per_element": SIZES["bits_per_element"], **held, **SIZES}
