"""Which model a command runs, said by processes without torch, too."""

from kvq.commands.screen import echo
from kvq.models.resolve import ModelSource

_SHOWN_DIGITS = 12  # of a digest


def say_model(source: ModelSource, digest: str) -> None:
    """Say on standard error which model was loaded."""
    echo(f"kvq: model {source}, digest {digest[:_SHOWN_DIGITS]}", err=True)
