"""`kvq simulate`: KV formats and policies under one load to come."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import (
    AT_LEAST_1,
    FILE,
    POSITIVE,
    TOKENS,
    Finite,
    Several,
    gathered,
    kv_option,
    option,
)
from kvq.commands.results import FinishedRows, result_of
from kvq.commands.screen import echo
from kvq.commands.sizing import PriceOptions, SizingOptions, sizing_options, target_options
from kvq.errors import ConfigError
from kvq.sizes import dollars

if TYPE_CHECKING:
    from kvq.evals.columns import Columns

_ROUTINGS = ("round-robin", "two-choices", "least-loaded", "session", "prefix", "affinity")
_PROGRESS_EVERY = 100  # requests


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A load, the fleet that serves it, what they must keep, and what goes wrong."""

    rate: float | None = option(None, "Requests per second, with random gaps.", type=POSITIVE)
    trace: Path | None = option(
        None, "Requests of a file: JSON lines (kvq's, Mooncake's) or CSV (Azure's).", type=FILE
    )
    requests: int | None = option(None, "How many.  [default: 2000, or the whole trace]", type=AT_LEAST_1)
    input_len: str = option("lognormal:256:0.7", "Tokens of prompts: 512, 16:512, lognormal:MEDIAN:SIGMA.")
    output_len: str = option("lognormal:128:0.7", "Tokens of answers, likewise.")
    shared_prefix: float = option(0.0, "Of each prompt, common to many.", type=Finite(0, 1))
    num_prefixes: int = option(1, "Different ones of these.", type=AT_LEAST_1)
    turns: int = option(1, "Of conversations whose prompts grow.", type=AT_LEAST_1)
    think_s: float = option(30.0, "Between turns, mean.", type=POSITIVE)
    batch_share: float = option(0.0, "Of requests in no hurry.", type=Finite(0, 1))
    replicas: tuple[int, ...] | None = option(
        None, "Engines: 4, or 1,2,4 to compare.  [default: 1]", type=Several(AT_LEAST_1)
    )
    routing: tuple[str, ...] = option(
        "least-loaded", f"{', '.join(_ROUTINGS)}; several to compare.", type=Several(click.Choice(_ROUTINGS))
    )
    prefill_replicas: int = option(0, "More engines, for prompts only.", type=click.IntRange(min=0))
    transfer_gb_s: float = option(50.0, "Of KV from those.", type=POSITIVE)
    overflow_waiting: int | None = option(
        None, "Waiting requests, then an API gets them.", type=click.IntRange(min=0)
    )
    slo_ttft_ms: float | None = option(None, "Goal for the first token.", type=POSITIVE)
    slo_itl_ms: float | None = option(None, "Goal for a request's mean gap.", type=POSITIVE)
    meet: float | None = option(
        None, "Find the replicas that meet it this often.", type=Finite(0, 1, min_open=True)
    )
    max_num_batched_tokens: tuple[int, ...] = option(
        "2048", "New tokens of a step; several to compare.", type=Several(TOKENS)
    )
    prefix_caching: bool = option(
        True, "Find what was computed before.", names="--prefix-caching/--no-prefix-caching"
    )
    speculation: str | None = option(
        None,
        "Drafted tokens: k=4,acceptance=0.8,draft=0.1. acceptance, how probably a draft is right if those "
        "before it were, is needed; k: most of a sequence in a step (4); draft: a pass of the draft, of a "
        "decode step (0, as of n-grams); adapts=false: always k, not as many as pay.  [default: off]",
    )
    seed: int = option(0, "Decides everything.", type=click.IntRange(min=0))
    faults: bool = option(False, "What production sees: clients leave, steps are slow, engines die.")


@click.command(name="simulate")
@target_options
@kv_option("auto,int4", many=True)
@gathered(Asked, "asked")
@gathered(PriceOptions, "api")
@sizing_options
def command(kv: list[str], sizing: SizingOptions, asked: Asked, api: PriceOptions) -> None:
    """Serve a load to come with the engine's own scheduler and block memory, without a GPU.

    Steps take what a roofline (or --calibrate) says: latency, throughput, preemptions, cost, for every
    KV format and policy, or the number of GPUs that an SLO needs. The same seed gives the same digest.

    With --faults clients leave in the middle of their answers, steps take 10 to 100 times as long, and
    engines die and come back empty, at moments that the seed decides.
    """
    from kvq.commands.progress import progress_bar
    from kvq.commands.simulate_fleet import Study

    sizing.check_paths()
    study = Study(sizing, asked, api.prices())
    cases = study.cases(kv)
    rows: list[dict[str, Any]] = []
    refused: list[str] = []
    with FinishedRows(sizing.json_path, result_of, lambda result: _show(result["rows"], asked)) as finished:
        with progress_bar("simulating") as bar:
            for done, case in enumerate(cases):

                def tell(come: int, before: int = done * study.num_requests) -> None:
                    if come % _PROGRESS_EVERY == 0:
                        bar(before + come, len(cases) * study.num_requests)

                try:
                    rows.append(study.row(case, tell))
                except ConfigError as error:
                    refused.append(str(error))
                finished.keep(rows.copy)
        if not rows:
            raise ConfigError(refused[0])
        note_winners(rows, finds_replicas=asked.meet is not None)
        result = finished.end(rows)
    for reason in dict.fromkeys(refused):
        echo(f"left out: {reason}", err=True)
    if sizing.html_path is not None:
        from kvq.commands.capacity_report import write_simulation

        write_simulation(sizing.html_path, result, columns(rows))


def note_winners(rows: list[dict[str, Any]], *, finds_replicas: bool = False) -> None:
    """Set `wins` of each row: is its routing the best of those that it is compared with?

    The fewest replicas win, then the most requests that keep the goals, then the lowest median TTFT. None
    where nothing else differs in its routing alone. `finds_replicas`: their number was looked for.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        replicas = None if finds_replicas else row["replicas"]
        groups.setdefault((row["kv"], row["max_num_batched_tokens"], replicas), []).append(row)
    for group in groups.values():
        best = min(group, key=lambda row: (row["replicas"], -(row["slo_met"] or 0), row["ttft_ms_p50"] or 0))
        for row in group:
            row["wins"] = row is best if len(group) > 1 else None


def columns(rows: list[dict[str, Any]]) -> "Columns":
    """What a table of simulations shows, by the keys of a row: what rows differ in, what happened at all."""
    compared = {"max_num_batched_tokens": ("chunk", ",d"), "routing": ("routing", "")}
    drafted = {"tokens_per_step": ("tokens a step", ",.2f")}
    rare = {
        "handover_ms_p99": ("handed over p99", ",.1f"),
        **{name: (name, ",d") for name in ("refused", "failed", "overflowed", "cancelled", "cut")},
        "slow_steps": ("slow steps", ",d"),
        "restarts": ("restarts", ",d"),
    }
    return {
        "kv": ("KV", ""),
        "gpus": ("GPUs", ",d"),
        **{key: one for key, one in compared.items() if len({row[key] for row in rows}) > 1},
        "output_tokens_per_s": ("tokens/s", ",.0f"),
        "ttft_ms_p50": ("TTFT p50", ",.0f"),
        "ttft_ms_p99": ("p99, ms", ",.0f"),
        "itl_ms_p50": ("ITL p50", ",.1f"),
        "itl_ms_p99": ("p99, ms", ",.1f"),
        "queue_ms_p99": ("queued p99", ",.0f"),
        "preemptions": ("preempted", ",d"),
        "prefix_hit_rate": ("hits", ".0%"),
        "mean_batch": ("batch", ",.1f"),
        **{key: one for key, one in drafted.items() if any(row["speculation"] for row in rows)},
        "peak_pool": ("pool", ".0%"),
        "slo_met": ("SLO met", ".1%"),
        "goodput_requests_per_s": ("req/s in SLO", ",.2f"),
        "usd_per_million_tokens": ("$ / million", dollars),
        **{key: one for key, one in rare.items() if any(row[key] for row in rows)},
    }


def _show(rows: list[dict[str, Any]], asked: Asked) -> None:
    from kvq.commands.tables import print_columns

    first, shown = rows[0], dict(columns(rows))
    if asked.slo_ttft_ms is None and asked.slo_itl_ms is None:
        del shown["slo_met"], shown["goodput_requests_per_s"]
    echo(f"{first['model']} on {first['gpu']}: {first['requests']:,} requests in {first['seconds']:,.0f} s")
    print_columns(rows, shown)
    for row in rows:
        if row.get("wins"):
            echo(f"{row['kv']}, {row['replicas']} replicas: {row['routing']} wins")
    for row in rows:
        told = [str(row[key]) for key in shown if key in ("kv", "gpus", "max_num_batched_tokens", "routing")]
        echo(f"digest {row['digest']}  {', '.join(told)}")
