"""`kvq bench linear`: Linear layers with quantized weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from kvq.commands.bench.options import KernelOptions, split_list
from kvq.commands.shared.declare import gathered, option, picked
from kvq.commands.shared.options import json_option
from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.results import FinishedRows, begin, result_of
from kvq.commands.shared.terminal import echo, print_columns
from kvq.errors import ConfigError
from kvq.evals.report.page import columns_of
from kvq.evals.watch import part_of
from kvq.formats.weights import parse_weight_format
from kvq.sizes import speed


@dataclass(frozen=True, kw_only=True, slots=True)
class _LinearOptions:
    weights: str = option("int8,int4,fp8", "Formats, with commas between.")
    rows: str = option("1,4,16,256", "Rows of inputs, with commas between.")
    shapes: tuple[str, ...] = option(
        ("4096x4096",), "OUTPUTSxINPUTS; may be given several times.", names="--shape", multiple=True
    )
    rivals: bool = option(True, "Also measure unquantized weights: kvq's product and torch's.")


@click.command(name="linear")
@gathered(_LinearOptions, "options")
@gathered(KernelOptions, "kernels")
@json_option
def linear(options: _LinearOptions, kernels: KernelOptions, json_path: str | None) -> None:
    """Time one Linear layer with quantized weights, compared with unquantized weights in kvq and torch.

    Every contender is checked against an fp64 product with the dequantized weight before any is timed.
    Weights are rotated to prevent caching, since products of few rows are limited by reading the weights.
    """
    from kvq.bench.kernels.linear import LinearWorkload, bench_linear, parse_shape

    begin(json_path)
    device, dtype = kernels.place()
    formats = split_list(options.weights, "--weights")
    for name in formats:
        parse_weight_format(name)
    counts = [_count(text) for text in split_list(options.rows, "--rows")]
    workloads = [
        LinearWorkload(
            out_features=outputs,
            in_features=inputs,
            rows=count,
            dtype=dtype,
            device=device,
            **picked(kernels, "backend", "seed"),
        )
        for outputs, inputs in map(parse_shape, options.shapes)
        for count in counts
    ]
    found: list[dict[str, Any]] = []
    bandwidths: list[float] = []

    def result(rows: Sequence[Any]) -> dict[str, Any]:
        return result_of(rows, device, {"read_gb_per_s": max(bandwidths)})

    with FinishedRows(json_path, result, _print) as finished:
        with progress_bar("linear") as progress:
            for number, workload in enumerate(workloads):
                measured, bandwidth = bench_linear(
                    workload,
                    formats,
                    rivals=options.rivals,
                    repeats=kernels.repeats,
                    progress=part_of(progress, number, len(workloads)),
                )
                found.extend(measured)
                bandwidths.append(bandwidth)
                finished.keep(found.copy)
        finished.end(found)


def _print(result: dict[str, Any]) -> None:
    echo(f"memory reads {speed(result['read_gb_per_s'])}")
    print_columns(result["rows"], columns_of("bench linear"))


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 1 << 16:
        raise ConfigError(f"--rows takes numbers from 1 to 65,536 with commas between, got {text!r}")
    return int(text)
