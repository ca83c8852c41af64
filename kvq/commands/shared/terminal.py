"""Terminal output with control characters spelled out: lines, tables, results, and kvq's log."""

import io
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvq.evals.report.page import Columns, table
from kvq.printable import one_line, printable

if TYPE_CHECKING:
    from rich.table import Table

    from kvq.commands.shared.consoles import PlainConsole
    from kvq.engine.requests.defaults import SamplingDefaults
    from kvq.models.describe.resolve import ModelSource

_SHOWN_DIGITS = 12  # number of digits shown of a digest
_WORDS = ("kv", "figure", "what that says", "task", "metric", "filter")  # heads of text columns


def echo(message: object = "", *, nl: bool = True, err: bool = False, color: str | None = None) -> None:
    """Print a text with control characters spelled out; a text with `color` is also bold."""
    text = printable(str(message))
    text = text if color is None else click.style(text, fg=color, bold=True)
    click.echo(text, nl=nl, err=err)  # noqa: TID251 - one of the two places


def warn(text: str) -> None:
    """Print a warning on standard error, as one line."""
    echo(f"kvq: warning: {one_line(text)}", err=True, color="yellow")


def say_model(source: "ModelSource", digest: str) -> None:
    """Print the model's source and digest on standard error."""
    echo(f"kvq: model {source}, digest {digest[:_SHOWN_DIGITS]}", err=True)


def say_defaults(source: "ModelSource", options: str) -> "SamplingDefaults":
    """Return the sampling defaults from a model's folder or another folder, and print them on standard error.

    `options`: the value of --generation-config.

    Raises:
        ConfigError: the folder named in `options` has no generation_config.json.
    """
    from kvq.engine.requests.defaults import read_defaults

    defaults = read_defaults(source.folder, options)
    if text := str(defaults):
        echo(f"kvq: {text}", err=True)
    return defaults


def stream(text: str) -> None:
    """Print a piece of generated text; on a terminal, spell out its control characters."""
    if sys.stdout.isatty():
        text = printable(text)
    click.echo(text, nl=False, color=True)  # noqa: TID251 - the other place; without `color` it drops escapes


def escape_unencodable() -> None:
    """Make the standard streams print characters missing from their encoding as Python escapes."""
    for out in (sys.stdout, sys.stderr):
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="backslashreplace")


_log = logging.getLogger("kvq")


class _Lines(logging.Handler):
    """Log handler that prints warnings as lines and passes info messages to a listener."""

    def __init__(self) -> None:
        super().__init__()
        self.on_stage: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            echo(f"kvq: {record.levelname.lower()}: {record.getMessage()}", err=True)
        elif self.on_stage is not None and record.levelno == logging.INFO:
            self.on_stage(record.getMessage())


_LINES = _Lines()


def show_warnings() -> None:
    """Print warnings from kvq's log from now on."""
    if _LINES not in _log.handlers:
        _log.addHandler(_LINES)


@contextmanager
def hear_stages(show: Callable[[str], None]) -> Iterator[None]:
    """Pass INFO messages from kvq's log to `show` inside the block."""
    show_warnings()
    level, before = _log.level, _LINES.on_stage
    _log.setLevel(logging.INFO)
    _LINES.on_stage = show
    try:
        yield
    finally:
        _LINES.on_stage = before
        _log.setLevel(level)


def console() -> "PlainConsole":
    """Return a console on standard output, wide enough for complete tables if the output is piped."""
    from kvq.commands.shared.consoles import PlainConsole

    out = PlainConsole()
    return out if out.is_terminal else PlainConsole(width=240)


def print_columns(rows: Iterable[Mapping[str, Any]], columns: Columns, *, width: int = 130) -> None:
    """Print a table with these columns, untruncated even if the terminal is narrower than `width`."""
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
    """Return a table without a frame; columns with a head in `texts` are left-aligned, others right-aligned.

    If all heads are empty, no header line is shown.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=any(heads))
    for head in heads:
        made.add_column(head, justify="left" if head in texts else "right", no_wrap=no_wrap)
    for row in cells:
        made.add_row(*row)
    return made


def print_origin(result: Mapping[str, Any], **more: str) -> None:
    """Print a result's model, the lines in `more`, and its device."""
    for name, value in {"model": result["model"], **more, "device": result["device"]}.items():
        echo(f"{name:<7} {value}")


def print_eval(result: dict[str, Any]) -> None:
    """Print a result's origin and all of its tables."""
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
    """Print the reasons why a result's figures say nothing about formats."""
    for line in result.get("cautions", ()):
        echo(f"\ncaution: {line}")


def print_check(result: dict[str, Any]) -> bool:
    """Print the outcome of a result; return True if its gates and its instrument check passed."""
    from kvq.evals.report.sections import outcomes

    if lines := [line for _, line in outcomes(result)]:
        echo("\n" + "\n".join(lines))
    instrument = result.get("instrument") or {"passed": True}
    return all(one["passed"] for one in (instrument, *result.get("gates", [])))
