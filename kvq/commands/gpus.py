"""`kvq gpus`: the GPUs that kvq plans with."""

from dataclasses import asdict
from pathlib import Path

import click


@click.command(name="gpus")
@click.option("--gpus", "file", type=click.Path(path_type=Path), help="A file of GPUs instead of kvq's own.")
@click.option(
    "--json", "json_path", type=click.Path(), help="Write them as JSON, in the form that --gpus reads."
)
def command(file: Path | None, json_path: str | None) -> None:
    """List GPUs: memory by data sheet and as a process sees it, bandwidth, arithmetic, price an hour."""
    import json

    from kvq import fileio
    from kvq.capacity.plan.gpus import known_gpus, read_gpus
    from kvq.commands.tables import console, new_table

    gpus = known_gpus() if file is None else read_gpus(file)
    heads = ("GPU", "GB", "GiB seen", "TB/s", "$/hour", "dense TFLOPS", "GiB seen at")
    table = new_table(heads, ("GPU", "dense TFLOPS", "GiB seen at"))
    for gpu in gpus.values():
        speeds = ", ".join(f"{kind} {value:,.0f}" for kind, value in gpu.tflops.items())
        table.add_row(
            gpu.name,
            f"{gpu.memory_gb:g}",
            "-" if gpu.total_mib is None else f"{gpu.total_mib / 1024:.2f}",
            f"{gpu.bandwidth_tb_s:g}",
            f"{gpu.usd_per_hour:.2f}",
            speeds,
            gpu.source,
        )
    console().print(table)
    if json_path is not None:
        facts = {
            gpu.name: {k: v for k, v in asdict(gpu).items() if k != "name" and v not in (None, "")}
            for gpu in gpus.values()
        }
        fileio.write_text(json_path, json.dumps({"format_version": 1, "gpus": facts}, indent=1) + "\n")
