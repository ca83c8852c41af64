"""Report tables as text cells, for the terminal and HTML, and the self-contained HTML page."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq.printable import printable
from kvq.sizes import binary, count, decimal, dollars, speed

# Key in a row (dots for nested keys) -> column head, and number format or formatting function; "" for texts
Columns = Mapping[str, tuple[str, Any]]


def table(rows: Iterable[Mapping[str, Any]], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Return column heads and cells, with a dash for None."""
    heads = [head for head, _ in columns.values()]
    return heads, [[_cell(row, key, style) for key, (_, style) in columns.items()] for row in rows]


def _cell(row: Any, key: str, style: Any) -> str:
    for part in key.split("."):
        row = row[int(part)] if isinstance(row, list) else row[part]
    if row is None:
        return "-"
    return style(row) if callable(style) else format(row, style)


def span(form: str) -> Callable[[tuple[float, float]], str]:
    """Return a function that formats both bounds of an interval."""
    return lambda bounds: f"{bounds[0]:{form}} .. {bounds[1]:{form}}"


def bits(value: float) -> str:
    """Format a number with up to three decimals, without trailing zeros."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


_STYLES: dict[str, Callable[[Any], str]] = {
    **{style.__name__: style for style in (binary, bits, count, decimal, dollars, speed, str)},
    **{"bytes": "{:,} B".format, "times": "{:.2f}x".format, "list": ", ".join},
    **{"mib": lambda mib: f"{mib / 1024:.2f}"},
    **{f"span {form}": span(form) for form in (".6f", ".2%", ".1f", ".1%")},
}


def columns_of(name: str) -> dict[str, tuple[str, Any]]:
    """Return the columns of a table in columns.json, whose formats may be names of `_STYLES`."""
    tables = json.loads(Path(__file__).with_name("columns.json").read_text(encoding="utf-8"))
    return {key: (head, _STYLES.get(style, style)) for key, (head, style) in tables[name].items()}


SIZES: Columns = columns_of("sizes")  # of a format


def sizes(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns of sizes, including `bits_held` if it exceeds the bits per element."""
    if all(row.get("bits_held", 0) < row["bits_per_element"] + 0.005 for row in rows):
        return SIZES
    held: Columns = {"bits_held": ("bits held", bits)}
    return {"bits_per_element": SIZES["bits_per_element"], **held, **SIZES}


def page(title: str, parts: Iterable[str]) -> str:
    """Return a complete page for `parts`, which are already HTML."""
    from html import escape  # not needed for the terminal

    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    whole = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )
    return printable(whole)  # HTML allows no control characters, and UTF-8 no lone surrogates


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table, which scrolls horizontally if it is too wide."""
    from html import escape

    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def origin(result: dict[str, Any]) -> str:
    """Return an HTML paragraph with the origin of figures: versions, commit, date and command."""
    from html import escape

    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f'<p class="small">kvq {escape(result["kvq_version"])}, commit {escape(str(result["commit"]))}, '
        f"{escape(result['date'])}, {escape(versions)}. Command: <code>{escape(result['command'])}</code></p>"
    )
