"""Results of commands: what is checked before they measure, and the JSON that they write."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def begin(*paths: str | Path | None, plot: str | Path | None = None) -> None:
    """Check where results go, and note which commit measures, before anything is measured.

    Raises:
        ConfigError: a path that can't be written, or a `plot` whose name is none of a picture.
    """
    from kvq import fileio
    from kvq.evals.figure import check_plot_path
    from kvq.evals.results import source_commit

    if plot is not None:
        check_plot_path(plot)
    for path in (*paths, plot):
        if path is not None:
            fileio.check_writable(path)
    source_commit()


def result_of(rows: Sequence[Any], device: "torch.device | None" = None, **more: object) -> dict[str, Any]:
    """The JSON envelope of rows that this command measured on a device, or counted without one."""
    import torch

    from kvq.evals.results import envelope

    return envelope(["kvq", *sys.argv[1:]], device or torch.device("cpu"), list(rows), **more)


def write_rows(
    rows: Sequence[Any], path: str | None, device: "torch.device | None" = None, **more: object
) -> None:
    """Write the rows as JSON, where that was asked for."""
    if path is not None:
        from kvq.evals.results import write_json

        write_json(path, result_of(rows, device, **more))
