"""A command with options of each kind that commands have, some of them from a file."""

from typing import Any

import click

from kvq.commands.shared.config_file import config_option
from kvq.commands.shared.param_types import TEXT_OR_MAPPING


@click.command()
@config_option
@click.option("--port", type=click.IntRange(0, 65535), default=8000)
@click.option("--wait", type=float, default=1.0)
@click.option("--model")
@click.option("--drafts", type=TEXT_OR_MAPPING)
@click.option("--folder", type=click.Path())
@click.option("--host", multiple=True)
@click.option("--fast/--slow")
@click.option("--max-num-seqs", type=int)
def command(**options: Any) -> None:
    """Keep what it was given."""
    command.seen = options  # type: ignore[attr-defined]
