"""What `kvq eval` and `kvq compare` print."""

from typing import Any

from rich.table import Table

from kvq.commands.screen import echo
from kvq.commands.tables import console, instrument_line, new_table
from kvq.evals.sections import sections

_WORDS = ("kv", "figure", "what that says", "task", "metric", "filter")  # heads of columns of text


def print_eval(result: dict[str, Any]) -> None:
    """Print every table of an evaluation, with what it was measured on."""
    out = console()
    first = result["rows"][0]
    out.print(f"\nmodel   {result['model']}", highlight=False)
    tokens = f", {first['tokens']:,} tokens predicted" if "tokens" in first else ""
    documents = f" ({first['documents']} documents)" if "documents" in first else ""
    out.print(
        f"text    {result['text']}{tokens}, windows of {result['context']}{documents}",
        highlight=False,
    )
    out.print(f"device  {result['device']}", highlight=False)
    for section in sections(result):
        out.print(f"\n{section.title}", style="bold", highlight=False)
        out.print(text_table(section.heads, section.cells))
        if section.note:
            out.print(section.note, style="dim", highlight=False)


def text_table(heads: Any, cells: Any) -> Table:
    """A table for the terminal: text to the left, figures to the right."""
    table = new_table(heads, _WORDS)
    for row in cells:
        table.add_row(*row)
    return table


def print_check(result: dict[str, Any]) -> bool:
    """Print how the gates and the check of the instrument ended; True if all passed."""
    passed = True
    for name, reason in result.get("void", {}).items():
        echo(f"\n{name} is VOID: {reason}")
    if check := result.get("instrument"):
        echo(f"\n{instrument_line(check)}")
        passed = check["passed"]
    for gate in result["gates"]:
        if gate["passed"]:
            echo(f"gate {gate['gate']}: passed")
            continue
        passed = False
        for failure in gate["failures"]:
            echo(f"gate {gate['gate']}: FAILED by {failure['told']}")
    return passed
