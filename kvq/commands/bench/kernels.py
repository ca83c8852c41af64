"""`kvq bench attention`, `write` and `tune`: kernels, compared with rivals in the same run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvq.commands.bench.options import KernelOptions, split_list
from kvq.commands.shared.declare import gathered, option, path_option, picked
from kvq.commands.shared.options import json_option
from kvq.commands.shared.param_types import BLOCK_SIZES, FORMATS, TO_WRITE, TOKENS
from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.results import FinishedRows, begin, result_of, write_rows
from kvq.commands.shared.terminal import echo, print_columns
from kvq.errors import ConfigError
from kvq.evals.report.page import columns_of
from kvq.sizes import parse_tokens, speed

if TYPE_CHECKING:
    from kvq.bench.kernels.workload import Workload

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShapeOptions:
    batch: int = option(1, "Sequences.", type=click.IntRange(1, 4096))
    context: str = option(
        "8192", "Tokens per sequence, including new ones; A-B for log-normal lengths between A and B."
    )
    q_heads: int = option(32, type=click.IntRange(1, 1024))
    kv_heads: int = option(8, type=click.IntRange(1, 1024))
    head_dim: int = option(128, type=click.IntRange(16, 256))
    block_size: int = option(64, "Tokens per block.", type=BLOCK_SIZES)

    def workload(self, new: int, kernels: KernelOptions) -> "Workload":
        """Check the options and return the workload that they describe.

        Raises:
            ConfigError: the options can't be combined.
        """
        from kvq.bench.kernels.workload import Workload, lengths

        if self.q_heads % self.kv_heads:
            raise ConfigError(
                f"--q-heads must be a multiple of --kv-heads, got {self.q_heads} and {self.kv_heads}"
            )
        device, dtype = kernels.place()
        contexts = lengths(self.context, self.batch, kernels.seed)
        if new > min(contexts):
            raise ConfigError(f"--new {new} is more than the shortest context of {min(contexts)} tokens")
        return Workload(
            contexts=contexts,
            new=new,
            **picked(self, "q_heads", "kv_heads", "head_dim", "block_size"),
            dtype=dtype,
            device=device,
            **picked(kernels, "backend", "seed"),
        )


def _formats_option(default: str = "bf16,fp8,int8,int4") -> Callable[[_Command], _Command]:
    text = "Formats, with commas between."
    return click.option("--kv", type=FORMATS, default=default, show_default=True, help=text)


_new_option = click.option(
    "--new", default=1, show_default=True, type=TOKENS, help="New tokens of each sequence."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AttentionOptions:
    rivals: Path | None = option(
        None, "Folder with your rivals.py.", type=click.Path(file_okay=False, path_type=Path)
    )
    dense: bool = option(True, "Also measure torch's attention.")
    latent_dim: int | None = option(
        None,
        "Measure latent attention: elements of a latent. --head-dim is then its rotary part, with "
        "--kv-heads 1: 512 and 64 in DeepSeek V3.",
        type=click.IntRange(16, 512),
    )
    expanded: int | None = option(
        None,
        "With --latent-dim: compare latents with K and V of every head, including projections. Elements "
        "of a head's V, and of its K without the rotary part: 128 in DeepSeek V3.",
        type=click.IntRange(8, 256),
    )
    plot_path: str | None = path_option("--plot", "Draw speed over bytes (.svg, .png, .pdf).")


@click.command(name="attention")
@_formats_option()
@_new_option
@gathered(_AttentionOptions, "options")
@gathered(_ShapeOptions, "shape")
@gathered(KernelOptions, "kernels")
@json_option
def attention(
    kv: str,
    new: int,
    options: _AttentionOptions,
    shape: _ShapeOptions,
    kernels: KernelOptions,
    json_path: str | None,
) -> None:
    """Time one layer's attention over quantized blocks: decode (--new 1) or extend.

    Every contender is checked against fp64 before any is timed; then all contenders are timed alternately.
    The data is several times as large as the last-level cache, or is rotated to prevent caching.
    """
    from kvq.bench.figures import roofline_figure
    from kvq.bench.kernels.attention import bench_attention
    from kvq.evals.report.figure import write_figure

    begin(json_path, plot=options.plot_path)
    workload = replace(shape.workload(new, kernels), **picked(options, "latent_dim", "expanded"))
    if workload.latent_dim is not None and options.rivals is not None:
        raise ConfigError("--rivals get dense K and V of heads, so they don't go with --latent-dim")
    with progress_bar("attention") as progress:
        rows, bandwidth = bench_attention(
            workload,
            split_list(kv, "--kv"),
            rivals=options.rivals,
            dense_rivals=options.dense,
            repeats=kernels.repeats,
            progress=progress,
        )
    first = rows[0]
    echo(
        f"{first['operation']}: batch {first['batch']}, context up to {first['context']:,}, "
        f"{first['new_tokens']} new, {first['q_heads']} query and {first['kv_heads']} KV heads of "
        f"{first['head_dim']}, blocks of {first['block_size']}; memory reads {speed(bandwidth)}"
    )
    print_columns(rows, columns_of("bench attention"))
    facts = {"read_gb_per_s": bandwidth}
    write_rows(rows, json_path, workload.device, facts)
    if options.plot_path is not None:
        write_figure(options.plot_path, roofline_figure, result_of(rows, workload.device, facts))


@click.command(name="write")
@_formats_option()
@_new_option
@gathered(_ShapeOptions, "shape")
@gathered(KernelOptions, "kernels")
@json_option
def write(kv: str, new: int, shape: _ShapeOptions, kernels: KernelOptions, json_path: str | None) -> None:
    """Time quantizing and storing one layer's K and V in a step; bytes are checked against the reference."""
    from kvq.bench.kernels.write import bench_write

    begin(json_path)
    workload, formats = shape.workload(new, kernels), split_list(kv, "--kv")
    with progress_bar("write") as progress:
        rows = bench_write(workload, formats, repeats=kernels.repeats, progress=progress)
    print_columns(rows, columns_of("bench write"))
    write_rows(rows, json_path, workload.device)


@click.command(name="tune")
@_formats_option("bf16,fp8,int8,int4,int4_g32_rot")
@click.option(
    "--new",
    default="1,512",
    show_default=True,
    help="New tokens: up to 64 query rows of a KV head tune decode, more tune extend.",
)
@click.option("--table", type=TO_WRITE, help="Table to write; default: kvq's own table.")
@gathered(_ShapeOptions, "shape")
@gathered(KernelOptions, "kernels")
@json_option
def tune(
    kv: str, new: str, table: str | None, shape: _ShapeOptions, kernels: KernelOptions, json_path: str | None
) -> None:
    """Find the fastest tile shapes of the Triton kernels on this GPU, and write them to the table."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("kvq bench tune times Triton kernels on a GPU, and torch sees none here")
    if kernels.backend not in ("auto", "triton"):
        raise ConfigError(f"kvq bench tune tunes --backend triton, got {kernels.backend}")
    from kvq.bench.kernels.tune import kind_of, tune, write_table
    from kvq.kernels.gpu.shapes import TABLE

    path = Path(table) if table else TABLE
    begin(path, json_path)
    workloads = [shape.workload(parse_tokens(n), kernels) for n in new.split(",")]
    if workloads[0].dtype is torch.float32:  # fp32 kernels use other tiles
        raise ConfigError("kvq bench tune tunes kernels of 16-bit queries, got --dtype fp32; use bf16")
    formats = split_list(kv, "--kv")
    rows: list[dict[str, Any]] = []
    result = partial(result_of, device=workloads[0].device)
    with FinishedRows(json_path, result, lambda _: None) as finished:
        for workload, name in product(workloads, formats):
            with progress_bar(f"{kind_of(workload)} {name}") as progress:
                key, best, tried = tune(workload, name, repeats=kernels.repeats, progress=progress)
            write_table([(key, best)], path)
            rows.extend(tried)
            finished.keep(rows.copy)
            echo(f"{key}: {best}")
        finished.end(rows)
