"""`kvq gpus`: GPUs for which kvq can plan."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from kvq import fileio
from kvq.commands.capacity.sizing import gpu_file_option, gpus_of
from kvq.commands.shared.param_types import TO_WRITE
from kvq.commands.shared.terminal import print_columns
from kvq.evals.report.page import columns_of


@click.command(name="gpus")
@gpu_file_option
@click.option("--json", "json_path", type=TO_WRITE, help="Write them as JSON, in the form that --gpus reads.")
def command(gpu_file: Path | None, json_path: str | None) -> None:
    """List GPUs with memory (data sheet and seen by a process), bandwidth, arithmetic and hourly price."""
    rows = [asdict(gpu) for gpu in gpus_of(gpu_file).values()]
    for row in rows:
        row["speeds"] = ", ".join(f"{kind} {value:,.0f}" for kind, value in row["tflops"].items())
    print_columns(rows, columns_of("gpus"))
    if json_path is not None:
        facts = {
            row["name"]: {k: v for k, v in row.items() if k not in ("name", "speeds") and v not in (None, "")}
            for row in rows
        }
        fileio.write_text(json_path, json.dumps({"format_version": 1, "gpus": facts}, indent=1) + "\n")
