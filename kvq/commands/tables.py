"""Tables on standard output."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.table import Table

from kvq.commands.consoles import PlainConsole
from kvq.evals.report import row_cells

Columns = Mapping[str, tuple[str, Any]]  # key of a row: heading, and number format or what makes its text
_PERPLEXITY = ("kv", "bits", "bytes/token", "vs bf16", "perplexity", "change", "KL mean", "KL 99.9%",
               "top-1", "seconds")  # fmt: skip


def console() -> PlainConsole:
    """A console on standard output, wide enough for whole tables when it is a pipe."""
    out = PlainConsole()
    return out if out.is_terminal else PlainConsole(width=240)


def new_table(
    heads: Iterable[str] = (), texts: Collection[str] = (), *, no_wrap: bool = True, **options: Any
) -> Table:
    """A table without a frame: columns whose head is in `texts` to the left, figures to the right."""
    table = Table(box=None, pad_edge=False, title_justify="left", **options)
    for head in heads:
        table.add_column(head, justify="left" if head in texts else "right", no_wrap=no_wrap)
    return table


def print_columns(rows: list[dict[str, Any]], columns: Columns, *, width: int = 130) -> None:
    """A table of those keys; texts, which need no format, to the left.

    It is printed whole where the terminal has fewer than `width` characters. None is a dash.
    """
    texts = [head for head, style in columns.values() if not style]
    table = new_table((head for head, _ in columns.values()), texts)
    for row in rows:
        table.add_row(*cells(row, columns))
    out = console()
    out.width = max(out.width, width)
    out.print(table)


def cells(row: Mapping[str, Any], columns: Columns) -> list[str]:
    """The texts of one row."""
    return [_cell(row[key], style) for key, (_, style) in columns.items()]


def _cell(value: Any, style: Any) -> str:
    if value is None:
        return "-"
    return style(value) if callable(style) else format(value, style)


def print_perplexity(result: dict[str, Any]) -> None:
    """Print the rows of `kvq perplexity` with what they were measured on."""
    out = console()
    table = new_table(_PERPLEXITY, ("kv",))
    for row in result["rows"]:
        table.add_row(*row_cells(row))
    out.print(f"model   {result['model']}", highlight=False)
    out.print(
        f"text    {result['text']}, {result['rows'][0]['tokens']:,} tokens predicted, "
        f"windows of {result['context']}",
        highlight=False,
    )
    out.print(f"device  {result['device']}", highlight=False)
    out.print()
    out.print(table)
    if check := result.get("instrument"):
        out.print()
        out.print(instrument_line(check), highlight=False)


def instrument_line(check: dict[str, Any]) -> str:
    """Say in one line whether the model and the text can show damage."""
    verdict = "can" if check["passed"] else "can NOT"
    return (
        f"instrument: this model on this text {verdict} show damage: "
        f"perplexity {check['window_change']:+.1%} with a {check['window_tokens']}-token window, "
        f"{check['int2_change']:+.1%} with {check['int2_format']} "
        f"(both must reach {check['limit']:+.0%})"
    )
