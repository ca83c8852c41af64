"""Tables on standard output, those of an evaluation among them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from kvq.commands.shared.consoles import PlainConsole
from kvq.commands.shared.terminal import echo
from kvq.evals.report.columns import Columns, table
from kvq.evals.report.sections import outcomes, sections


def console() -> PlainConsole:
    """A console on standard output, wide enough for whole tables when it is a pipe."""
    out = PlainConsole()
    return out if out.is_terminal else PlainConsole(width=240)


def new_table(
    heads: Iterable[str] = (), texts: Collection[str] = (), *, no_wrap: bool = True, show_header: bool = True
) -> Table:
    """A table without a frame: columns whose head is in `texts` to the left, figures to the right."""
    table = Table(box=None, pad_edge=False, show_header=show_header)
    for head in heads:
        table.add_column(head, justify="left" if head in texts else "right", no_wrap=no_wrap)
    return table


def print_columns(rows: Iterable[Mapping[str, Any]], columns: Columns, *, width: int = 130) -> None:
    """A table of those columns, printed whole where the terminal has fewer than `width` characters."""
    out = console()
    out.width = max(out.width, width)
    out.print(text_table(*table(rows, columns), [head for head, style in columns.values() if not style]))


def text_table(heads: Iterable[str], cells: Iterable[Sequence[str]], texts: Collection[str]) -> Table:
    """A table of cells that are texts already; columns of `texts` to the left."""
    made = new_table(heads, texts)
    for row in cells:
        made.add_row(*row)
    return made


WORDS = ("kv", "figure", "what that says", "task", "metric", "filter")  # heads of columns of text


def print_eval(result: dict[str, Any]) -> None:
    """Print every table of a result, with what it was measured on."""
    out = console()
    print_cautions(result)
    first = result["rows"][0]
    tokens = f", {first['tokens']:,} tokens predicted" if "tokens" in first else ""
    documents = f" ({first['documents']} documents)" if "documents" in first else ""
    out.print(f"\nmodel   {result['model']}")
    out.print(f"text    {result['text']}{tokens}, windows of {result['context']}{documents}")
    out.print(f"device  {result['device']}")
    for section in sections(result):
        out.print(f"\n{section.title}", style="bold")
        out.print(text_table(section.heads, section.cells, WORDS))
        if section.note:
            out.print(section.note, style="dim")


def print_cautions(result: Mapping[str, Any]) -> None:
    """Print, before all else, why the figures of a result say nothing of formats."""
    for line in result.get("cautions", ()):
        echo(f"\nmind: {line}")


def print_check(result: dict[str, Any]) -> bool:
    """Print how a result ended, by `outcomes`; True if its gates and the check of the instrument passed."""
    if lines := [line for _, line in outcomes(result)]:
        echo("\n" + "\n".join(lines))
    instrument = result.get("instrument") or {"passed": True}
    return all(one["passed"] for one in (instrument, *result.get("gates", [])))
