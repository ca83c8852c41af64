"""`kvq bench linear`: Linear layers over quantized weights."""

import sys
from typing import Any

import click

from kvq.sizes import speed

_COLUMNS = {
    "name": ("name", ""),
    "weights": ("weights", ""),
    "backend": ("backend", ""),
    "rows": ("rows", ","),
    "out_features": ("outputs", ","),
    "in_features": ("inputs", ","),
    "ms_median": ("ms median", ",.3f"),
    "ms_p10": ("p10", ",.3f"),
    "ms_p90": ("p90", ",.3f"),
    "gb_per_s": ("read", speed),
    "fraction_of_limit": ("of reading", ".1%"),
    "max_relative_error": ("error", ".1e"),
}


@click.command(name="linear")
@click.option("--weights", default="int8,int4,fp8", show_default=True, help="Formats, with commas between.")
@click.option("--rows", default="1,4,16,256", show_default=True, help="Rows of inputs, with commas between.")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    default=["4096x4096"],
    show_default=True,
    help="OUTPUTSxINPUTS; may be given several times.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--backend", default="auto", show_default=True, help="auto, triton, cpu or reference.")
@click.option("--dtype", default="auto", show_default=True, help="Of the inputs: fp32, bf16, fp16.")
@click.option(
    "--rivals/--no-rivals",
    default=True,
    show_default=True,
    help="Unquantized weights beside: kvq's product and torch's.",
)
@click.option("--repeats", default=20, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=click.Path(), help="Write the rows as JSON.")
def linear(
    weights: str, rows: str, shapes: tuple[str, ...], json_path: str | None, rivals: bool, **options: Any
) -> None:
    """One Linear layer over quantized weights beside torch's over plain ones.

    Every contender is checked against fp64 of the dequantized weight before any is timed. Weights are
    rotated past the last-level cache; few rows are limited by reading them.
    """
    from kvq import fileio
    from kvq.bench.linear import parse_shape
    from kvq.commands.tables import print_columns
    from kvq.evals.results import envelope, source_commit, write_json
    from kvq.models.device import pick_device

    if json_path is not None:
        fileio.check_writable(json_path)
    source_commit()
    device = pick_device(options.pop("device"))
    counts = [_count(text) for text in _listed(rows, "--rows")]
    found, bandwidths = [], []
    for outputs, inputs in [parse_shape(text) for text in shapes]:
        for count in counts:
            measured, bandwidth = _measure(
                (outputs, inputs, count), _listed(weights, "--weights"), device, rivals, **options
            )
            found += measured
            bandwidths.append(bandwidth)
    click.echo(f"memory reads {speed(max(bandwidths))}")
    print_columns(found, _COLUMNS)
    if json_path is not None:
        write_json(json_path, envelope(sys.argv, device, found, read_gb_per_s=max(bandwidths)))


def _measure(
    shape: tuple[int, int, int],
    formats: list[str],
    device: Any,
    rivals: bool,
    *,
    dtype: str,
    backend: str,
    repeats: int,
    seed: int,
) -> tuple[list[dict[str, Any]], float]:
    """The rows of one shape (outputs, inputs, rows) and the bandwidth measured with them."""
    import torch

    from kvq.bench.linear import LinearWorkload, bench_linear
    from kvq.commands.progress import counted, progress_bar
    from kvq.errors import ConfigError

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = ("bf16" if device.type == "cuda" else "fp32") if dtype == "auto" else dtype
    if dtype not in dtypes:
        raise ConfigError(f"--dtype must be auto, {', '.join(dtypes)}, got {dtype!r}")
    outputs, inputs, rows = shape
    workload = LinearWorkload(
        out_features=outputs, in_features=inputs, rows=rows, dtype=dtypes[dtype], device=device, seed=seed
    )
    with progress_bar(f"{outputs}x{inputs}, {rows} rows") as progress:
        return bench_linear(
            workload,
            formats,
            backend=backend,
            rivals=rivals,
            repeats=repeats,
            progress=counted(progress, repeats),
        )


def _listed(text: str, option: str) -> list[str]:
    from kvq.errors import ConfigError

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option} takes values with commas between, got none")
    return names


def _count(text: str) -> int:
    from kvq.errors import ConfigError

    if not text.isdigit() or not 0 < int(text) <= 1 << 16:
        raise ConfigError(f"--rows takes numbers from 1 to 65,536 with commas between, got {text!r}")
    return int(text)
