"""Results of commands: what is checked before they measure, and the JSON that they write."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.errors import ConfigError

if TYPE_CHECKING:
    import torch


def begin(*paths: str | Path | None, plot: str | Path | None = None) -> None:
    """Check where results go, and note which commit measures, before anything is measured.

    Raises:
        ConfigError: a path that can't be written, two that are one file, or a `plot` whose name is none of a
            picture.
    """
    from kvq import fileio
    from kvq.evals.figure import check_plot_path
    from kvq.evals.results import source_commit

    if plot is not None:
        check_plot_path(plot)
    named = [path for path in (*paths, plot) if path is not None]
    if len({fileio.check_writable(path).resolve() for path in named}) < len(named):
        raise ConfigError(
            f"two results would go into one file: {', '.join(map(str, named))}; give each a name of its own"
        )
    source_commit()


def json_beside(html_path: str | None, json_path: str | None) -> str | None:
    """Where the JSON goes: if only a page is named, beside that."""
    if html_path is None or json_path is not None:
        return json_path
    return str(Path(html_path).with_suffix(".json"))


def result_of(
    rows: Sequence[Any], device: "torch.device | None" = None, facts: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """The JSON envelope of rows that this command measured on a device, or counted without one, and facts."""
    import torch

    from kvq.evals.results import envelope

    return envelope(["kvq", *sys.argv[1:]], device or torch.device("cpu"), rows, facts)


def write_rows(
    rows: Sequence[Any],
    path: str | None,
    device: "torch.device | None" = None,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write the rows as JSON, where that was asked for."""
    if path is not None:
        from kvq.evals.results import write_json

        write_json(path, result_of(rows, device, facts))
