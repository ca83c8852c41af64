"""Tables on standard output, those of an evaluation among them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvq.commands.shared.terminal import echo

if TYPE_CHECKING:
    from rich.table import Table

    from kvq.commands.shared.consoles import PlainConsole
    from kvq.evals.report.page import Columns

_WORDS = ("kv", "figure", "what that says", "task", "metric", "filter")  # heads of text columns


def console() -> "PlainConsole":
    """Return a console on standard output, wide enough for whole tables when it is a pipe."""
    from kvq.commands.shared.consoles import PlainConsole

    out = PlainConsole()
    return out if out.is_terminal else PlainConsole(width=240)


def print_columns(rows: Iterable[Mapping[str, Any]], columns: "Columns", *, width: int = 130) -> None:
    """Print a table of these columns, whole even if the terminal has fewer than `width` characters."""
    from kvq.evals.report.page import table

    out = console()
    out.width = max(out.width, width)
    out.print(text_table(*table(rows, columns), [head for head, style in columns.values() if not style]))


def text_table(
    heads: Sequence[str],
    cells: Iterable[Sequence[str]],
    texts: Collection[str] = _WORDS,
    *,
    no_wrap: bool = True,
) -> "Table":
    """Return a table without a frame; columns whose head is in `texts` are left-aligned, others right.

    Without any head no line of heads is shown.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=any(heads))
    for head in heads:
        made.add_column(head, justify="left" if head in texts else "right", no_wrap=no_wrap)
    for row in cells:
        made.add_row(*row)
    return made


def print_origin(result: Mapping[str, Any], **more: str) -> None:
    """Print what a result was measured on: its model, further lines, and its device."""
    for name, value in {"model": result["model"], **more, "device": result["device"]}.items():
        echo(f"{name:<7} {value}")


def print_eval(result: dict[str, Any]) -> None:
    """Print every table of a result, with what it was measured on."""
    from kvq.evals.report.sections import sections

    out = console()
    print_cautions(result)
    first = result["rows"][0]
    tokens = f", {first['tokens']:,} tokens predicted" if "tokens" in first else ""
    documents = f" ({first['documents']} documents)" if "documents" in first else ""
    echo()
    print_origin(result, text=f"{result['text']}{tokens}, windows of {result['context']}{documents}")
    for section in sections(result):
        out.print(f"\n{section.title}", style="bold")
        out.print(text_table(section.heads, section.cells))
        if section.note:
            out.print(section.note, style="dim")


def print_cautions(result: Mapping[str, Any]) -> None:
    """Print reasons why the figures of a result tell nothing about formats."""
    for line in result.get("cautions", ()):
        echo(f"\ncaution: {line}")


def print_check(result: dict[str, Any]) -> bool:
    """Print the outcome of a result; True if its gates and the check of the instrument passed."""
    from kvq.evals.report.sections import outcomes

    if lines := [line for _, line in outcomes(result)]:
        echo("\n" + "\n".join(lines))
    instrument = result.get("instrument") or {"passed": True}
    return all(one["passed"] for one in (instrument, *result.get("gates", [])))
