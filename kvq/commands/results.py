"""Files of rows that a command counted, not measured on a device."""

import sys
from collections.abc import Callable
from typing import Any


def write_rows(
    rows: list[dict[str, Any]],
    json_path: str | None,
    html_path: str | None = None,
    write_page: Callable[[str, dict[str, Any]], object] | None = None,
) -> None:
    """Write the rows as JSON, and as a page, where they were asked for."""
    if json_path is None and html_path is None:
        return
    import torch

    from kvq.evals.results import envelope, write_json

    result = envelope(["kvq", *sys.argv[1:]], torch.device("cpu"), rows)
    if json_path is not None:
        write_json(json_path, result)
    if html_path is not None and write_page is not None:
        write_page(html_path, result)
