"""`kvq bench linear`: Linear layers over quantized weights."""

from typing import TYPE_CHECKING, Any

import click

from kvq.commands.screen import echo
from kvq.sizes import speed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvq.bench.linear import LinearWorkload

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
    weights: str,
    rows: str,
    shapes: tuple[str, ...],
    device: str,
    backend: str,
    dtype: str,
    rivals: bool,
    repeats: int,
    seed: int,
    json_path: str | None,
) -> None:
    """One Linear layer over quantized weights beside torch's over plain ones.

    Every contender is checked against fp64 of the dequantized weight before any is timed. Weights are
    rotated past the last-level cache; few rows are limited by reading them.
    """
    from kvq.bench.linear import bench_linear, parse_shape
    from kvq.commands.finished import FinishedRows
    from kvq.commands.progress import counted, progress_bar
    from kvq.commands.results import begin, result_of
    from kvq.formats.weights import parse_weight_format
    from kvq.models.device import pick_device

    begin(json_path)
    where = pick_device(device)
    formats = _listed(weights, "--weights")
    for name in formats:
        parse_weight_format(name)
    counts = [_count(text) for text in _listed(rows, "--rows")]
    workloads = [
        _workload(parse_shape(shape), count, where, dtype=dtype, seed=seed)
        for shape in shapes
        for count in counts
    ]
    found: list[dict[str, Any]] = []
    bandwidths: list[float] = []

    def result(rows: "Sequence[Any]") -> dict[str, Any]:
        return result_of(rows, where, {"read_gb_per_s": max(bandwidths)})

    with FinishedRows(json_path, result, _print) as finished:
        with progress_bar("linear") as progress:
            for number, workload in enumerate(workloads):
                measured, bandwidth = bench_linear(
                    workload,
                    formats,
                    backend=backend,
                    rivals=rivals,
                    repeats=repeats,
                    progress=counted(progress, len(workloads) * repeats, done=number * repeats),
                )
                found.extend(measured)
                bandwidths.append(bandwidth)
                finished.keep(found.copy)
        finished.end(found)


def _print(result: dict[str, Any]) -> None:
    from kvq.commands.tables import print_columns

    echo(f"memory reads {speed(result['read_gb_per_s'])}")
    print_columns(result["rows"], _COLUMNS)


def _workload(
    shape: tuple[int, int], rows: int, device: "torch.device", *, dtype: str, seed: int
) -> "LinearWorkload":
    """Check the options of one shape and put them together."""
    import torch

    from kvq.bench.linear import LinearWorkload
    from kvq.errors import ConfigError

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = ("bf16" if device.type == "cuda" else "fp32") if dtype == "auto" else dtype
    if dtype not in dtypes:
        raise ConfigError(f"--dtype must be auto, {', '.join(dtypes)}, got {dtype!r}")
    return LinearWorkload(
        out_features=shape[0], in_features=shape[1], rows=rows, dtype=dtypes[dtype], device=device, seed=seed
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
