"""`kvq bench`: how fast the parts are."""

from dataclasses import asdict
from typing import Any

import click

from kvq.commands.bench_engine import engine
from kvq.commands.bench_kernels import attention, tune, write
from kvq.commands.bench_linear import linear
from kvq.commands.bench_serve import serve
from kvq.commands.screen import echo


@click.group(name="bench")
def command() -> None:
    """Measure how fast kvq's parts are; every benchmark checks correctness first."""


command.add_command(attention)
command.add_command(write)
command.add_command(linear)
command.add_command(tune)
command.add_command(engine)
command.add_command(serve)


@command.command(name="blocks")
@click.option("--sequences", default=1000, show_default=True, type=click.IntRange(1, 100_000))
@click.option(
    "--blocks-per-sequence", default=64, show_default=True, type=click.IntRange(1, 10_000), help="Of prompts."
)
@click.option(
    "--blocks",
    default=100_000,
    show_default=True,
    type=click.IntRange(128, 10_000_000),
    help="Of the large pool.",
)
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1, 4096), help="Tokens.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@click.option("--json", "json_path", type=click.Path(), help="Write the rows as JSON.")
def blocks(
    sequences: int, blocks_per_sequence: int, blocks: int, block_size: int, seed: int, json_path: str | None
) -> None:
    """Block memory: allocate, append, free, hash, look up, fork; and how full blocks are.

    Plain Python on one core, prefix index on. Times are medians in microseconds.
    """
    from kvq.bench.blocks import bench_blocks
    from kvq.bench.utilization import measure_utilization
    from kvq.commands.progress import progress_bar
    from kvq.commands.results import begin, write_rows

    begin(json_path)
    with progress_bar("blocks") as progress:
        rows = bench_blocks(
            num_sequences=sequences,
            blocks_per_sequence=blocks_per_sequence,
            num_blocks=blocks,
            block_size=block_size,
            seed=seed,
            progress=progress,
        )
    filled = measure_utilization(block_size=block_size, seed=seed)
    _print(rows)
    echo(
        f"{filled.paged_mean:.1%} of slots in live blocks hold tokens (10th percentile "
        f"{filled.paged_p10:.1%}): {filled.sequences} running sequences, log-normal lengths with median "
        f"{filled.median_length} tokens, block {block_size}.\n"
        f"One buffer of {filled.longest:,} tokens each: {filled.contiguous_mean:.1%}."
    )
    write_rows(rows, json_path, facts={"utilization": asdict(filled)})


def _print(rows: list[dict[str, Any]]) -> None:
    from kvq.commands.consoles import PlainConsole
    from kvq.commands.tables import new_table

    out = PlainConsole()
    for scale in dict.fromkeys(row["scale"] for row in rows):
        table = new_table(title=scale)
        table.add_column("operation", min_width=20)
        for name in ("us median", "p10", "p90"):
            table.add_column(name, justify="right", min_width=9)
        table.add_column("per")
        for row in rows:
            if row["scale"] == scale:
                times = (f"{row[key]:,.2f}" for key in ("us_median", "us_p10", "us_p90"))
                table.add_row(row["operation"], *times, row["per"])
        out.print(table)
        out.print()
