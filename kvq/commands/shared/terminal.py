"""Terminal output: lines on standard output and standard error, and kvq's log, without control characters."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kvq.printable import one_line, printable

if TYPE_CHECKING:
    from kvq.engine.requests.defaults import SamplingDefaults
    from kvq.models.describe.resolve import ModelSource

_SHOWN_DIGITS = 12  # of a digest


def echo(message: object = "", *, nl: bool = True, err: bool = False, color: str | None = None) -> None:
    """Print a text with its control characters spelled out; in `color` it is bold."""
    text = printable(str(message))
    text = text if color is None else click.style(text, fg=color, bold=True)
    click.echo(text, nl=nl, err=err)  # noqa: TID251 - the one place


def warn(text: str) -> None:
    """Print a warning on standard error, as one line."""
    echo(f"kvq: warning: {one_line(text)}", err=True, color="yellow")


def say_model(source: "ModelSource", digest: str) -> None:
    """Print on standard error which model was loaded."""
    echo(f"kvq: model {source}, digest {digest[:_SHOWN_DIGITS]}", err=True)


def say_defaults(source: "ModelSource", options: str) -> "SamplingDefaults":
    """Return the sampling defaults of a model's folder, or another, and print them on standard error.

    `options`: the value of --generation-config.

    Raises:
        ConfigError: it names no such folder.
    """
    from kvq.engine.requests.defaults import read_defaults

    defaults = read_defaults(source.folder, options)
    if text := str(defaults):
        echo(f"kvq: {text}", err=True)
    return defaults


def stream(text: str) -> None:
    """Print a part of a generated text: as it is into a file or a pipe, control characters spelled out on a
    terminal."""
    if sys.stdout.isatty():
        text = printable(text)
    click.echo(text, nl=False, color=True)  # noqa: TID251 - the other one; without `color` it drops escapes


def escape_unencodable() -> None:
    """Print characters that a stream's encoding lacks as Python's escapes from now on."""
    for out in (sys.stdout, sys.stderr):
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="backslashreplace")


_log = logging.getLogger("kvq")


class _Lines(logging.Handler):
    """Log handler that prints warnings as lines, and passes on information to a listener."""

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
    """Print warnings of kvq's log from now on."""
    if _LINES not in _log.handlers:
        _log.addHandler(_LINES)


@contextmanager
def hear_stages(show: Callable[[str], None]) -> Iterator[None]:
    """Pass messages that kvq's log gets at the level of information to `show` inside the block."""
    show_warnings()
    level, before = _log.level, _LINES.on_stage
    _log.setLevel(logging.INFO)
    _LINES.on_stage = show
    try:
        yield
    finally:
        _LINES.on_stage = before
        _log.setLevel(level)
