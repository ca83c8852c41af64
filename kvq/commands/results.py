"""Results of rows that a command counted, not measured on a device."""

import sys
from collections.abc import Sequence
from typing import Any


def counted_rows(rows: Sequence[Any]) -> dict[str, Any]:
    """The JSON envelope of such rows."""
    import torch

    from kvq.evals.results import envelope

    return envelope(["kvq", *sys.argv[1:]], torch.device("cpu"), list(rows))


def write_rows(rows: Sequence[Any], path: str | None) -> None:
    """Write the rows as JSON, where that was asked for."""
    if path is not None:
        from kvq.evals.results import write_json

        write_json(path, counted_rows(rows))
