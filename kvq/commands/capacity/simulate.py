"""`kvq simulate`: KV formats and policies under one simulated load."""

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

import click

from kvq.commands.capacity.simulate_options import SimulateOptions
from kvq.commands.capacity.sizing import PriceOptions, SizingOptions, sizing_options, target_options
from kvq.commands.shared.declare import SectionedCommand, gathered
from kvq.commands.shared.options import kv_option
from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.results import FinishedRows, result_of
from kvq.commands.shared.terminal import echo, print_columns
from kvq.errors import ConfigError
from kvq.evals.report.page import Columns, columns_of
from kvq.evals.watch import Progress, part_of
from kvq.sizes import binary

_PROGRESS_EVERY = 100  # requests
_COMPARED = ("kv", "gpus", "max_num_batched_tokens", "routing", "kv_host", "kv_disk")
_RARE = ("handover_ms_p99", "refused", "failed", "overflowed", "cancelled", "cut", "slow_steps", "restarts")
_PLACES = {"kv_host": "host memory", "kv_disk": "disk"}
_GAINS = ("output_tokens_per_s", "ttft_ms_p95", "prefix_hit_rate")


@click.command(name="simulate", cls=SectionedCommand)
@target_options
@kv_option("auto,int4", many=True)
@gathered(SimulateOptions, "options")
@gathered(PriceOptions, "api")
@sizing_options
def command(kv: list[str], sizing: SizingOptions, options: SimulateOptions, api: PriceOptions) -> None:
    """Simulate a load with the engine's own scheduler and block memory, without a GPU.

    Step times come from a roofline (or --calibrate). The table shows latency, throughput, preemptions and
    cost for every KV format and policy, or the number of GPUs required to meet an SLO. Runs with the same
    seed have the same digest.

    With --faults, clients disconnect before their answers are complete, some steps take 10 to 100 times as
    long, and engines crash and restart empty, at times determined by the seed.
    """
    from kvq.commands.capacity.simulate_fleet import Study

    sizing.check_paths()
    study = Study(sizing, options, api.prices())
    cases = study.cases(kv)
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    with FinishedRows(sizing.json_path, result_of, lambda result: _show(result["rows"], options)) as finished:
        with progress_bar("simulating") as bar:
            for number, case in enumerate(cases):
                progress = part_of(bar, number, len(cases))

                def arrived(count: int, progress: Progress = progress) -> None:
                    if count % _PROGRESS_EVERY == 0:
                        progress(count, study.num_requests)

                try:
                    rows.append(study.row(case, arrived))
                except ConfigError as error:
                    refused.append(str(error))
                finished.keep(rows.copy)
        if not rows:
            raise ConfigError(refused[0])
        note_winners(rows, finds_replicas=options.meet is not None)
        result = finished.end(rows)
    for reason in dict.fromkeys(refused):
        echo(f"left out: {reason}", err=True)
    if sizing.html_path is not None:
        from kvq.commands.capacity.capacity_report import write_simulation

        write_simulation(sizing.html_path, result, columns(rows))


def note_winners(rows: list[dict[str, Any]], *, finds_replicas: bool = False) -> None:
    """Set `wins` of each row: True if its routing is the best among rows that differ only in routing.

    The winner needs the fewest replicas; ties are resolved by the share of requests that meet the goals, then
    by the lowest median TTFT. `wins` is None if there is no row to compare with. `finds_replicas`: whether
    the number of replicas is a search result.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        replicas = None if finds_replicas else row["replicas"]
        key = (row["kv"], row["max_num_batched_tokens"], row["kv_host"], row["kv_disk"], replicas)
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        best = min(group, key=lambda row: (row["replicas"], -(row["slo_met"] or 0), row["ttft_ms_p50"] or 0))
        for row in group:
            row["wins"] = row is best if len(group) > 1 else None


def gains(rows: list[dict[str, Any]], key: str, shown: Collection[str]) -> Iterator[str]:
    """Yield what a GiB of a tier buys, for each pair of successive sizes in rows that are otherwise alike."""
    alike = [name for name in _COMPARED if name != key]
    for less, more in pairwise(sorted(rows, key=lambda row: [row[name] for name in (*alike, key)])):
        if [less[name] for name in alike] == [more[name] for name in alike]:
            gib = (more[key] - less[key]) / (1 << 30)
            tokens, p95, hits = [((more[name] or 0) - (less[name] or 0)) / gib for name in _GAINS]
            yield (
                f"{_label(more, [name for name in alike if name in shown])}, {binary(less[key])} to "
                f"{_label(more, [key])}: each GiB buys {tokens:+,.3g} tokens/s, {p95:+,.0f} ms of TTFT "
                f"p95, {hits:+.1%} of hits"
            )


def _label(row: dict[str, Any], names: Iterable[str]) -> str:
    """Return a row's values of compared fields."""
    sizes = {name: f"{binary(row[name])} of {place}" for name, place in _PLACES.items()}
    return ", ".join(sizes.get(name) or str(row[name]) for name in names)


def columns(rows: list[dict[str, Any]]) -> Columns:
    """Return the table's columns, omitting compared fields that do not differ and events that never occur."""
    found = columns_of("simulate")
    hidden = {key for key in _COMPARED[2:] if len({row[key] for row in rows}) == 1}
    hidden |= {key for key in _RARE if not any(row[key] for row in rows)}
    hidden |= set() if any(row["speculation"] for row in rows) else {"tokens_per_step"}
    return {key: column for key, column in found.items() if key not in hidden}


def _show(rows: list[dict[str, Any]], options: SimulateOptions) -> None:
    first, shown = rows[0], dict(columns(rows))
    if options.slo_ttft_ms is None and options.slo_itl_ms is None:
        del shown["slo_met"], shown["goodput_requests_per_s"]
    echo(f"{first['model']} on {first['gpu']}: {first['requests']:,} requests in {first['seconds']:,.0f} s")
    print_columns(rows, shown)
    for row in rows:
        if row.get("wins"):
            echo(f"{row['kv']}, {row['replicas']} replicas: {row['routing']} wins")
    for line in (*gains(rows, "kv_host", shown), *gains(rows, "kv_disk", shown)):
        echo(line)
    for row in rows:
        echo(f"digest {row['digest']}  {_label(row, [name for name in shown if name in _COMPARED])}")
