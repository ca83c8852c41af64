"""`kvq bench attention`, `write` and `tune`: the kernels, beside rivals of the same run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvq.commands.bench.options import TIMES, KernelOptions, listed
from kvq.commands.shared.names import FORMATS
from kvq.commands.shared.options import (
    BLOCK_SIZES,
    TO_WRITE,
    TOKENS,
    gathered,
    json_option,
    option,
    path_option,
    picked,
)
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError
from kvq.sizes import parse_tokens, speed

if TYPE_CHECKING:
    from kvq.bench.kernels.workload import Workload

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShapeOptions:
    """The shape of one layer's step."""

    batch: int = option(1, "Sequences.", type=click.IntRange(1, 4096))
    context: str = option(
        "8192", "Tokens per sequence, new ones included; A-B for log-normal lengths between both."
    )
    q_heads: int = option(32, type=click.IntRange(1, 1024))
    kv_heads: int = option(8, type=click.IntRange(1, 1024))
    head_dim: int = option(128, type=click.IntRange(16, 256))
    block_size: int = option(64, "Tokens.", type=BLOCK_SIZES)

    def workload(self, new: int, how: KernelOptions) -> "Workload":
        """Check the options and put them together.

        Raises:
            ConfigError: they don't go together.
        """
        from kvq.bench.kernels.workload import Workload, lengths

        if self.q_heads % self.kv_heads:
            raise ConfigError(
                f"--q-heads must be a multiple of --kv-heads, got {self.q_heads} and {self.kv_heads}"
            )
        device, dtype = how.place()
        contexts = lengths(self.context, self.batch, how.seed)
        if new > min(contexts):
            raise ConfigError(f"--new {new} is more than the shortest context of {min(contexts)} tokens")
        return Workload(
            contexts=contexts,
            new=new,
            **picked(self, "q_heads", "kv_heads", "head_dim", "block_size"),
            dtype=dtype,
            device=device,
            **picked(how, "backend", "seed"),
        )


def _formats_option(default: str = "bf16,fp8,int8,int4") -> Callable[[_Command], _Command]:
    text = "Formats, with commas between."
    return click.option("--kv", type=FORMATS, default=default, show_default=True, help=text)


_new_option = click.option("--new", default=1, show_default=True, type=TOKENS, help="Tokens each adds.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What else is measured, and drawn."""

    rivals: Path | None = option(
        None, "A folder with a rivals.py of yours.", type=click.Path(file_okay=False, path_type=Path)
    )
    dense: bool = option(True, "torch's attention beside.")
    latent_dim: int | None = option(
        None,
        "Latent attention over latents of so many elements, --head-dim being their rotary part's, with "
        "--kv-heads 1: 512 and 64 in DeepSeek V3.",
        type=click.IntRange(16, 512),
    )
    expanded: int | None = option(
        None,
        "With --latent-dim: latents against K and V of every head, of so many elements each and K's rotary "
        "part, projections included: 128 in DeepSeek V3.",
        type=click.IntRange(8, 256),
    )
    plot_path: str | None = path_option("--plot", "Draw speed over bytes (.svg, .png, .pdf).")


@click.command(name="attention")
@_formats_option()
@_new_option
@gathered(Beside, "beside")
@gathered(_ShapeOptions, "shape")
@gathered(KernelOptions, "how")
@json_option
def attention(
    kv: str, new: int, beside: Beside, shape: _ShapeOptions, how: KernelOptions, json_path: str | None
) -> None:
    """One layer's attention over quantized blocks: decode (--new 1) or extend.

    Every contender is checked against fp64 before any is timed; then all are timed in turn. Data is
    several times the last-level cache, or rotated past it.
    """
    from kvq.bench.figures import roofline_figure
    from kvq.bench.kernels.attention import bench_attention
    from kvq.commands.shared.progress import counted, progress_bar
    from kvq.commands.shared.results import begin, result_of, write_rows
    from kvq.evals.report.figure import write_figure

    begin(json_path, plot=beside.plot_path)
    workload = replace(shape.workload(new, how), latent_dim=beside.latent_dim)
    if workload.latent_dim is not None and beside.rivals is not None:
        raise ConfigError("--rivals get dense K and V of heads, so they don't go with --latent-dim")
    with progress_bar("attention") as progress:
        rows, bandwidth = bench_attention(
            workload,
            listed(kv, "--kv"),
            rivals=beside.rivals,
            dense_rivals=beside.dense,
            expanded=beside.expanded,
            repeats=how.repeats,
            progress=counted(progress, how.repeats),
        )
    _print_attention(rows, bandwidth)
    facts = {"read_gb_per_s": bandwidth}
    write_rows(rows, json_path, workload.device, facts)
    if beside.plot_path is not None:
        write_figure(beside.plot_path, roofline_figure, result_of(rows, workload.device, facts))


@click.command(name="write")
@_formats_option()
@_new_option
@gathered(_ShapeOptions, "shape")
@gathered(KernelOptions, "how")
@json_option
def write(kv: str, new: int, shape: _ShapeOptions, how: KernelOptions, json_path: str | None) -> None:
    """Quantize and store one step's K and V of one layer; bytes are checked against the reference."""
    from kvq.bench.kernels.write import bench_write
    from kvq.commands.shared.progress import counted, progress_bar
    from kvq.commands.shared.results import begin, write_rows
    from kvq.commands.shared.tables import print_columns

    begin(json_path)
    workload = shape.workload(new, how)
    with progress_bar("write") as progress:
        step = counted(progress, how.repeats)
        rows = bench_write(workload, listed(kv, "--kv"), repeats=how.repeats, progress=step)
    columns = {
        "kv": ("kv", ""),
        "backend": ("backend", ""),
        "tokens": ("tokens", ","),
        "us_median": ("us median", ",.1f"),
        "us_p10": ("p10", ",.1f"),
        "us_p90": ("p90", ",.1f"),
        "gb_per_s": ("written", speed),
    }
    print_columns(rows, columns)
    write_rows(rows, json_path, workload.device)


@click.command(name="tune")
@_formats_option("bf16,fp8,int8,int4,int4_g32_rot")
@click.option(
    "--new",
    default="1,512",
    show_default=True,
    help="New tokens: up to 64 query rows of a KV head tune decode, more extend.",
)
@click.option("--table", type=TO_WRITE, help="Where to write; default: kvq's own table.")
@gathered(_ShapeOptions, "shape")
@gathered(KernelOptions, "how")
@json_option
def tune(
    kv: str, new: str, table: str | None, shape: _ShapeOptions, how: KernelOptions, json_path: str | None
) -> None:
    """Find the fastest tile shapes of the Triton kernels on this GPU and write them into the table."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("kvq bench tune times Triton kernels on a GPU, and torch sees none here")
    if how.backend not in ("auto", "triton"):
        raise ConfigError(f"kvq bench tune tunes --backend triton, got {how.backend}")
    from kvq.bench.kernels.tiles import axes
    from kvq.bench.kernels.tune import kind_of, tune, write_table
    from kvq.commands.shared.progress import counted, progress_bar
    from kvq.commands.shared.results import FinishedRows, begin, result_of
    from kvq.kernels.gpu.shapes import TABLE

    path = Path(table) if table else TABLE
    begin(path, json_path)
    workloads = [shape.workload(parse_tokens(n), how) for n in new.split(",")]
    if workloads[0].dtype is torch.float32:  # whose kernels have tiles of their own
        raise ConfigError("kvq bench tune tunes kernels of 16-bit queries, got --dtype fp32; use bf16")
    formats = listed(kv, "--kv")
    rows: list[dict[str, Any]] = []
    result = partial(result_of, device=workloads[0].device)
    with FinishedRows(json_path, result, lambda _: None) as finished:
        for workload, name in product(workloads, formats):
            kind = kind_of(workload)
            with progress_bar(f"{kind} {name}") as progress:
                step = counted(progress, sum(map(len, axes(kind))))
                key, best, tried = tune(workload, name, repeats=how.repeats, progress=step)
            write_table([(key, best)], path)
            rows.extend(tried)
            finished.keep(rows.copy)
            echo(f"{key}: {best}")
        finished.end(rows)


def _print_attention(rows: list[dict[str, Any]], bandwidth: float) -> None:
    from kvq.commands.shared.tables import print_columns

    columns = {
        "name": ("name", ""),
        "kv": ("kv", ""),
        "backend": ("backend", ""),
        **TIMES,
        "fraction_of_bandwidth": ("of reading", ".1%"),
        "max_relative_error": ("error", ".1e"),
    }
    first = rows[0]
    echo(
        f"{first['operation']}: batch {first['batch']}, context up to {first['context']:,}, "
        f"{first['new_tokens']} new, {first['q_heads']} query and {first['kv_heads']} KV heads of "
        f"{first['head_dim']}, blocks of {first['block_size']}; memory reads {speed(bandwidth)}"
    )
    print_columns(rows, columns)
