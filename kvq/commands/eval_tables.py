"""What `kvq eval`, `kvq perplexity` and `kvq compare` print."""

from typing import Any

from kvq.commands.screen import echo
from kvq.commands.tables import console, text_table
from kvq.evals.sections import outcomes, sections

WORDS = ("kv", "figure", "what that says", "task", "metric", "filter")  # heads of columns of text


def print_eval(result: dict[str, Any]) -> None:
    """Print every table of a result, with what it was measured on."""
    out = console()
    first = result["rows"][0]
    tokens = f", {first['tokens']:,} tokens predicted" if "tokens" in first else ""
    documents = f" ({first['documents']} documents)" if "documents" in first else ""
    out.print(f"\nmodel   {result['model']}", highlight=False)
    out.print(f"text    {result['text']}{tokens}, windows of {result['context']}{documents}", highlight=False)
    out.print(f"device  {result['device']}", highlight=False)
    for section in sections(result):
        out.print(f"\n{section.title}", style="bold", highlight=False)
        out.print(text_table(section.heads, section.cells, WORDS))
        if section.note:
            out.print(section.note, style="dim", highlight=False)


def print_check(result: dict[str, Any]) -> bool:
    """Print how the gates and the check of the instrument ended; True if all passed."""
    if lines := [line for _, line in outcomes(result)]:
        echo("\n" + "\n".join(lines))
    instrument = result.get("instrument") or {"passed": True}
    return all(one["passed"] for one in (instrument, *result.get("gates", [])))
