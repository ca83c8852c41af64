"""`kvq simulate`: KV formats and policies under one load to come."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.types import StringParamType

from kvq.commands.options import Finite, gathered, kv_option
from kvq.commands.results import result_of
from kvq.commands.screen import echo
from kvq.commands.sizing import SizingOptions, price_options, sizing_options, target_options
from kvq.errors import ConfigError
from kvq.sizes import dollars

if TYPE_CHECKING:
    from kvq.commands.tables import Columns

_ROUTINGS = ("round-robin", "least-loaded", "session", "prefix")
_PROGRESS_EVERY = 100  # requests


class _Several(StringParamType):
    """Values with commas between; a tuple of them, each once."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The tuple."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(self._of.convert(one.strip(), param, ctx) for one in value.split(",")))
        except click.BadParameter as error:
            self.fail(f"{error.message} Several have commas between.", param, ctx)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A load, the fleet that serves it, what they must keep, and what goes wrong."""

    rate: float | None
    trace: Path | None
    requests: int | None
    input_len: str
    output_len: str
    shared_prefix: float
    num_prefixes: int
    turns: int
    think_s: float
    batch_share: float
    replicas: tuple[int, ...] | None
    routing: tuple[str, ...]
    prefill_replicas: int
    transfer_gb_s: float
    overflow_waiting: int | None
    api_input: float | None
    api_output: float | None
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    meet: float | None
    max_num_batched_tokens: tuple[int, ...]
    prefix_caching: bool
    seed: int
    faults: bool


@click.command(name="simulate")
@target_options
@kv_option("fp16,int4", many=True)
@click.option("--rate", type=Finite(min=0, min_open=True), help="Requests per second, with random gaps.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Requests of a file instead: JSON lines (kvq's, Mooncake's) or CSV (Azure's).",
)
@click.option("--requests", type=click.IntRange(min=1), help="How many.  [default: 2000, or the whole trace]")
@click.option(
    "--input-len",
    default="lognormal:256:0.7",
    show_default=True,
    help="Tokens of prompts: 512, 16:512, lognormal:MEDIAN:SIGMA.",
)
@click.option(
    "--output-len", default="lognormal:128:0.7", show_default=True, help="Tokens of answers, likewise."
)
@click.option("--shared-prefix", default=0.0, type=Finite(0, 1), help="Of each prompt, common to many.")
@click.option("--num-prefixes", default=1, type=click.IntRange(min=1), help="Different ones of these.")
@click.option("--turns", default=1, type=click.IntRange(min=1), help="Of conversations whose prompts grow.")
@click.option("--think-s", default=30.0, type=Finite(min=0, min_open=True), help="Between turns, mean.")
@click.option("--batch-share", default=0.0, type=Finite(0, 1), help="Of requests in no hurry.")
@click.option(
    "--replicas",
    type=_Several(click.IntRange(min=1)),
    help="Engines: 4, or 1,2,4 to compare.  [default: 1]",
)
@click.option(
    "--routing",
    type=_Several(click.Choice(_ROUTINGS)),
    default="least-loaded",
    show_default=True,
    help=f"{', '.join(_ROUTINGS)}; several to compare.",
)
@click.option(
    "--prefill-replicas", default=0, type=click.IntRange(min=0), help="More engines, for prompts only."
)
@click.option("--transfer-gb-s", default=50.0, type=Finite(min=0, min_open=True), help="Of KV from those.")
@click.option(
    "--overflow-waiting", type=click.IntRange(min=0), help="Waiting requests, then an API gets them."
)
@price_options
@click.option("--slo-ttft-ms", type=Finite(min=0, min_open=True), help="Goal for the first token.")
@click.option("--slo-itl-ms", type=Finite(min=0, min_open=True), help="Goal for a request's mean gap.")
@click.option("--meet", type=Finite(0, 1, min_open=True), help="Find the replicas that meet it this often.")
@click.option(
    "--max-num-batched-tokens",
    type=_Several(click.IntRange(min=1)),
    default="2048",
    show_default=True,
    help="New tokens of a step; several to compare.",
)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Decides everything.")
@click.option(
    "--faults", is_flag=True, help="What production sees: clients leave, steps are slow, engines die."
)
@sizing_options
@gathered(Asked, "asked")
def command(kv: list[str], sizing: SizingOptions, asked: Asked) -> None:
    """Serve a load to come with the engine's own scheduler and block memory, without a GPU.

    Steps take what a roofline (or --calibrate) says: latency, throughput, preemptions, cost, for every
    KV format and policy, or the number of GPUs that an SLO needs. The same seed gives the same digest.

    With --faults clients leave in the middle of their answers, steps take 10 to 100 times as long, and
    engines die and come back empty, at moments that the seed decides.
    """
    from kvq.commands.finished import FinishedRows
    from kvq.commands.progress import progress_bar
    from kvq.commands.simulate_fleet import Study

    sizing.check_paths()
    study = Study(sizing, asked)
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
        result = finished.end(rows)
    for reason in dict.fromkeys(refused):
        echo(f"left out: {reason}", err=True)
    if sizing.html_path is not None:
        from kvq.commands.capacity_report import write_simulation

        write_simulation(sizing.html_path, result, columns(rows))


def columns(rows: list[dict[str, Any]]) -> "Columns":
    """What a table of simulations shows, by the keys of a row: what rows differ in, what happened at all."""
    compared = {"max_num_batched_tokens": ("chunk", ",d"), "routing": ("routing", "")}
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
        told = [str(row[key]) for key in shown if key in ("kv", "gpus", "max_num_batched_tokens", "routing")]
        echo(f"digest {row['digest']}  {', '.join(told)}")
