"""Lines on standard output and standard error: whatever they quote can't steer the terminal."""

import io
import sys

import click

from kvq.printable import printable


def echo(message: object = "", *, nl: bool = True, err: bool = False, color: str | None = None) -> None:
    """Print a text, its controls shown, or bold in a colour."""
    text = printable(str(message))
    text = text if color is None else click.style(text, fg=color, bold=True)
    click.echo(text, nl=nl, err=err)  # noqa: TID251 - the one place


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
