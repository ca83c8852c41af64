"""`kvq bench`: benchmarks of kvq's components."""

from dataclasses import asdict, dataclass

import click

from kvq.commands.bench.engine import engine
from kvq.commands.bench.kernels import attention, tune, write
from kvq.commands.bench.linear import linear
from kvq.commands.bench.serve import serve
from kvq.commands.bench.speculation import speculation
from kvq.commands.bench.vllm import vllm
from kvq.commands.shared.declare import gathered, option
from kvq.commands.shared.options import json_option
from kvq.commands.shared.param_types import BLOCK_SIZES
from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.results import begin, write_rows
from kvq.commands.shared.terminal import echo, print_columns
from kvq.evals.report.page import columns_of


@click.group(name="bench")
def command() -> None:
    """Measure the speed of kvq's components; every benchmark checks correctness first."""


for _one in (attention, write, linear, tune, engine, serve, speculation, vllm):
    command.add_command(_one)

_COLUMNS = columns_of("bench blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlocksOptions:
    num_sequences: int = option(1000, names="--sequences", type=click.IntRange(1, 100_000))
    blocks_per_sequence: int = option(64, "Blocks of each prompt.", type=click.IntRange(1, 10_000))
    num_blocks: int = option(
        100_000, "Blocks of the large pool.", names="--blocks", type=click.IntRange(128, 10_000_000)
    )
    block_size: int = option(16, "Tokens per block.", type=BLOCK_SIZES)
    seed: int = option(0, "Seed of the prompts.")


@command.command(name="blocks")
@gathered(_BlocksOptions, "options")
@json_option
def blocks(options: _BlocksOptions, json_path: str | None) -> None:
    """Time block memory (allocate, append, free, hash, look up, fork), and show how full blocks are.

    The code is plain Python on one core, with the prefix index on. Times are medians in microseconds.
    """
    from kvq.bench.blocks import bench_blocks, measure_utilization

    begin(json_path)
    with progress_bar("blocks") as progress:
        rows = bench_blocks(**asdict(options), progress=progress)
    filled = measure_utilization(block_size=options.block_size, seed=options.seed)
    for scale in dict.fromkeys(row["scale"] for row in rows):
        echo(scale)
        print_columns([row for row in rows if row["scale"] == scale], _COLUMNS)
        echo()
    echo(
        f"{filled['paged_mean']:.1%} of slots in live blocks hold tokens (10th percentile "
        f"{filled['paged_p10']:.1%}): {filled['sequences']} running sequences, log-normal lengths with "
        f"median {filled['median_length']} tokens, block {filled['block_size']}.\n"
        f"One buffer of {filled['longest']:,} tokens each: {filled['contiguous_mean']:.1%}."
    )
    write_rows(rows, json_path, facts={"utilization": filled})
