"""`kvq bench attention`, `write` and `tune`: the kernels, beside rivals of the same run."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvq.commands.names import FORMATS
from kvq.commands.screen import echo
from kvq.sizes import speed

if TYPE_CHECKING:
    from kvq.bench.workload import Workload

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SHAPE_OPTIONS = (
    click.option("--batch", default=1, show_default=True, type=click.IntRange(1, 4096), help="Sequences."),
    click.option(
        "--context",
        default="8192",
        show_default=True,
        help="Tokens per sequence, new ones included; A-B for log-normal lengths between both.",
    ),
    click.option("--q-heads", default=32, show_default=True, type=click.IntRange(1, 1024)),
    click.option("--kv-heads", default=8, show_default=True, type=click.IntRange(1, 1024)),
    click.option("--head-dim", default=128, show_default=True, type=click.IntRange(16, 256)),
    click.option("--block-size", default=64, show_default=True, type=click.IntRange(1, 4096), help="Tokens."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option(
        "--backend",
        default="auto",
        show_default=True,
        help="auto, triton, cpu, cpu-fp32 (fp32 arithmetic) or reference.",
    ),
    click.option("--dtype", default="auto", show_default=True, help="Of Q: fp32, bf16, fp16."),
    click.option("--repeats", default=20, show_default=True, type=click.IntRange(1, 10_000)),
    click.option("--seed", default=0, show_default=True),
    click.option("--json", "json_path", type=click.Path(), help="Write the rows as JSON."),
)


def _formats_option(default: str) -> Callable[[_Command], _Command]:
    text = "Formats, with commas between."
    return click.option("--kv", type=FORMATS, default=default, show_default=True, help=text)


def _with_shape(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_SHAPE_OPTIONS):
        command = option(command)
    return command


@click.command(name="attention")
@_formats_option("bf16,fp8,int8,int4")
@click.option("--new", default=1, show_default=True, type=click.IntRange(1), help="Tokens each adds.")
@click.option("--rivals", type=click.Path(file_okay=False), help="A folder with a rivals.py of yours.")
@click.option("--dense/--no-dense", default=True, show_default=True, help="torch's attention beside.")
@click.option("--plot", "plot_path", type=click.Path(), help="Draw speed over bytes (.svg, .png, .pdf).")
@_with_shape
def attention(
    kv: str,
    new: int,
    rivals: str | None,
    dense: bool,
    plot_path: str | None,
    json_path: str | None,
    backend: str,
    repeats: int,
    **shape: Any,
) -> None:
    """One layer's attention over quantized blocks: decode (--new 1) or extend.

    Every contender is checked against fp64 before any is timed; then all are timed in turn. Data is
    several times the last-level cache, or rotated past it.
    """
    from kvq.bench.attention import bench_attention
    from kvq.bench.roofline import write_roofline
    from kvq.commands.progress import counted, progress_bar
    from kvq.commands.results import begin, result_of
    from kvq.evals.results import write_json

    begin(json_path, plot=plot_path)
    workload = _workload(new=new, **shape)
    with progress_bar("attention") as progress:
        rows, bandwidth = bench_attention(
            workload,
            _formats(kv),
            backend=backend,
            rivals=None if rivals is None else Path(rivals),
            dense_rivals=dense,
            repeats=repeats,
            progress=counted(progress, repeats),
        )
    _print_attention(rows, bandwidth)
    result = result_of(rows, workload.device, {"read_gb_per_s": bandwidth})
    if json_path is not None:
        write_json(json_path, result)
    if plot_path is not None:
        write_roofline(plot_path, result)


@click.command(name="write")
@_formats_option("bf16,fp8,int8,int4")
@click.option("--new", default=1, show_default=True, type=click.IntRange(1), help="Tokens each adds.")
@_with_shape
def write(kv: str, new: int, json_path: str | None, backend: str, repeats: int, **shape: Any) -> None:
    """Quantize and store one step's K and V of one layer; bytes are checked against the reference."""
    from kvq.bench.write import bench_write
    from kvq.commands.progress import counted, progress_bar
    from kvq.commands.results import begin, write_rows
    from kvq.commands.tables import print_columns

    begin(json_path)
    workload = _workload(new=new, **shape)
    with progress_bar("write") as progress:
        rows = bench_write(
            workload, _formats(kv), backend=backend, repeats=repeats, progress=counted(progress, repeats)
        )
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
@click.option("--new", default="1,512", show_default=True, help="New tokens: 1 tunes decode, more extend.")
@click.option("--table", type=click.Path(dir_okay=False), help="Where to write; default: kvq's own table.")
@_with_shape
def tune(
    kv: str, new: str, table: str | None, json_path: str | None, backend: str, repeats: int, **shape: Any
) -> None:
    """Find the fastest tile shapes of the Triton kernels on this GPU and write them into the table."""
    import torch

    from kvq.errors import ConfigError

    if not torch.cuda.is_available() or backend not in ("auto", "triton"):
        raise ConfigError("kvq bench tune times Triton kernels on an NVIDIA GPU, and torch sees none here")
    from kvq.bench.tune import candidates, tune, write_table
    from kvq.commands.finished import FinishedRows
    from kvq.commands.progress import counted, progress_bar
    from kvq.commands.results import begin, result_of
    from kvq.kernels.gpu.shapes import TABLE

    path = Path(table) if table else TABLE
    begin(path, json_path)
    workloads = [_workload(new=int(n), **shape) for n in new.split(",")]
    formats = _formats(kv)
    rows: list[dict[str, Any]] = []
    result = partial(result_of, device=workloads[0].device)
    with FinishedRows(json_path, result, lambda _: None) as finished:
        for workload, name in product(workloads, formats):
            kind = "decode" if workload.new == 1 else "extend"
            with progress_bar(f"{kind} {name}") as progress:
                step = counted(progress, len(candidates(kind)))
                key, best, tried = tune(workload, name, repeats=repeats, progress=step)
            write_table([(key, best)], path)
            rows.extend(tried)
            finished.keep(rows.copy)
            echo(f"{key}: {best}")
        finished.end(rows)


def _workload(
    *,
    new: int,
    batch: int,
    context: str,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    device: str,
    dtype: str,
    seed: int,
) -> "Workload":
    """Check the options of a shape and put them together."""
    import torch

    from kvq.bench.workload import Workload, lengths
    from kvq.errors import ConfigError
    from kvq.models.device import pick_device

    if q_heads % kv_heads:
        raise ConfigError(f"--q-heads must be a multiple of --kv-heads, got {q_heads} and {kv_heads}")
    where = pick_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # graphs and events are of the current device
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = ("bf16" if where.type == "cuda" else "fp32") if dtype == "auto" else dtype
    if dtype not in dtypes:
        raise ConfigError(f"--dtype must be auto, {', '.join(dtypes)}, got {dtype!r}")
    contexts = lengths(context, batch, seed)
    if new > min(contexts):
        raise ConfigError(f"--new {new} is more than the shortest context of {min(contexts)} tokens")
    return Workload(
        contexts=contexts,
        new=new,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtypes[dtype],
        device=where,
        seed=seed,
    )


def _formats(kv: str) -> list[str]:
    from kvq.errors import ConfigError

    names = [name.strip() for name in kv.split(",") if name.strip()]
    if not names:
        raise ConfigError("--kv takes formats with commas between, such as int8,int4; got none")
    return names


def _print_attention(rows: list[dict[str, Any]], bandwidth: float) -> None:
    from kvq.commands.tables import print_columns

    columns = {
        "name": ("name", ""),
        "kv": ("kv", ""),
        "backend": ("backend", ""),
        "ms_median": ("ms median", ",.3f"),
        "ms_p10": ("p10", ",.3f"),
        "ms_p90": ("p90", ",.3f"),
        "gb_per_s": ("read", speed),
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
