"""Sampling defaults of a model's folder, said by processes without torch, too."""

from kvq.commands.screen import echo
from kvq.engine.defaults import SamplingDefaults, read_defaults
from kvq.models.resolve import ModelSource


def say_defaults(source: ModelSource, asked: str) -> SamplingDefaults:
    """The sampling defaults that a model's folder brings, or another; said on standard error, if any.

    Raises:
        ConfigError: `asked` names no such folder.
    """
    defaults = read_defaults(source.folder, asked)
    if told := str(defaults):
        echo(f"kvq: {told}", err=True)
    return defaults
