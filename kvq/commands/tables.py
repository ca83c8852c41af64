"""Tables on standard output."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kvq.commands.consoles import PlainConsole
from kvq.evals.report import row_cells


def console() -> PlainConsole:
    """A console on standard output, wide enough for whole tables when it is a pipe."""
    out = PlainConsole()
    return out if out.is_terminal else PlainConsole(width=240)


def print_columns(rows: list[dict[str, Any]], columns: Mapping[str, tuple[str, Any]]) -> None:
    """A table of those keys: header of each, and its number format or what makes its text; none for texts."""
    table = Table(box=None, pad_edge=False)
    for header, style in columns.values():
        table.add_column(header, justify="right" if style else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            *(
                style(row[key]) if callable(style) else format(row[key], style)
                for key, (_, style) in columns.items()
            )
        )
    out = PlainConsole()
    out.width = max(out.width, 130)  # a table in a file or a pipe is not cut
    out.print(table)


def print_perplexity(result: dict[str, Any]) -> None:
    """Print the rows of `kvq perplexity` with what they were measured on."""
    out = console()
    table = Table(box=None, pad_edge=False)
    for name in (
        "kv",
        "bits",
        "bytes/token",
        "vs bf16",
        "perplexity",
        "change",
        "KL mean",
        "KL 99.9%",
        "top-1",
        "seconds",
    ):
        table.add_column(name, justify="left" if name == "kv" else "right", no_wrap=True)
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
