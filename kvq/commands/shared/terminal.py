"""Lines on standard output and standard error, kvq's own log among them: they can't steer the terminal."""

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
    """Print a text, its controls shown, or bold in a colour."""
    text = printable(str(message))
    text = text if color is None else click.style(text, fg=color, bold=True)
    click.echo(text, nl=nl, err=err)  # noqa: TID251 - the one place


def warn(text: str) -> None:
    """Print a warning on standard error, as one line."""
    echo(f"kvq: warning: {one_line(text)}", err=True, color="yellow")


def say_model(source: "ModelSource", digest: str) -> None:
    """Say on standard error which model was loaded."""
    echo(f"kvq: model {source}, digest {digest[:_SHOWN_DIGITS]}", err=True)


def say_defaults(source: "ModelSource", options: str) -> "SamplingDefaults":
    """The sampling defaults that a model's folder brings, or another; said on standard error, if any.

    Raises:
        ConfigError: `asked` names no such folder.
    """
    from kvq.engine.requests.defaults import read_defaults

    defaults = read_defaults(source.folder, options)
    if told := str(defaults):
        echo(f"kvq: {told}", err=True)
    return defaults


def stream(text: str) -> None:
    """Print a part of a generated text: into a file or a pipe to the letter, on a terminal with its controls
    shown."""
    if sys.stdout.isatty():
        text = printable(text)
    click.echo(text, nl=False, color=True)  # noqa: TID251 - the other one; without `color` it leaves out escapes


def take_every_text() -> None:
    """From now on what a stream's encoding has no code for is shown as Python writes it."""
    for out in (sys.stdout, sys.stderr):
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="backslashreplace")


_log = logging.getLogger("kvq")


class _Lines(logging.Handler):
    """Warnings as lines, and what is information to whoever listens."""

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
    """Show what kvq warns of from now on."""
    if _LINES not in _log.handlers:
        _log.addHandler(_LINES)


@contextmanager
def hear_stages(tell: Callable[[str], None]) -> Iterator[None]:
    """Hand on what kvq's log says at the level of information meanwhile."""
    show_warnings()
    level, before = _log.level, _LINES.on_stage
    _log.setLevel(logging.INFO)
    _LINES.on_stage = tell
    try:
        yield
    finally:
        _LINES.on_stage = before
        _log.setLevel(level)
