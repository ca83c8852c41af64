"""`kvq bench engine`: the engine as a service, beside transformers' own."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.options import ModelOptions, Size, gathered, kv_option, model_options
from kvq.commands.screen import echo

if TYPE_CHECKING:
    from kvq.bench.engine import Plan
    from kvq.models.prepared import PreparedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is asked of the engine, as the command line says it."""

    requests: int
    input_len: str
    output_len: str
    rate: str
    concurrency: str | None
    shared_prefix: float
    priority: str | None
    kv_memory: str | None
    blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    rivals: str
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    repeats: int
    step_costs: bool
    seed: int


@click.command(name="engine")
@kv_option("bf16,int4", many=True)
@model_options
@click.option("--requests", default=32, show_default=True, type=click.IntRange(1, 100_000))
@click.option(
    "--input-len",
    default="128",
    show_default=True,
    help="Tokens of prompts: 128, 16:512 (uniform), or lognormal:MEDIAN:SIGMA.",
)
@click.option("--output-len", default="64", show_default=True, help="Tokens of outputs, likewise.")
@click.option("--rate", default="inf", show_default=True, help="Requests per second, with random gaps.")
@click.option(
    "--concurrency",
    help="So many users at a time instead of --rate; 1,4,8,16,32 stops where throughput grows no more.",
)
@click.option(
    "--shared-prefix",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of each prompt that all have in common.",
)
@click.option(
    "--priority",
    type=click.Choice(["interactive", "batch"]),
    help="interactive keeps prefills from delaying the tokens of others.  [default: batch where all "
    "requests arrive at once]",
)
@click.option(
    "--kv-memory",
    type=Size(),
    help="Size of the KV pool, such as 512MiB.  [default: all that the load needs]",
)
@click.option("--blocks", type=click.IntRange(1), help="Size of the KV pool in blocks per layer group.")
@click.option("--max-num-seqs", default=128, show_default=True, type=click.IntRange(1, 65_536))
@click.option("--max-num-batched-tokens", default=2048, show_default=True, type=click.IntRange(1, 1 << 20))
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@click.option("--rivals", default="none", show_default=True, help="none, or of hf-static,hf-continuous.")
@click.option("--slo-ttft-ms", type=click.FloatRange(min=0, min_open=True), help="For the 99th percentile.")
@click.option("--slo-itl-ms", type=click.FloatRange(min=0, min_open=True), help="For the 99th percentile.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--step-costs", is_flag=True, help="Also what the parts of steps take, for --calibrate of others."
)
@click.option("--seed", default=0, show_default=True, help="Of lengths, arrivals and token ids.")
@click.option("--json", "json_path", type=click.Path(), help="Write the rows as JSON.")
@click.option("--plot", "plot_path", type=click.Path(), help="Draw latency over throughput (.svg, .png).")
@gathered(Asked, "asked")
def engine(
    kv: list[str],
    model_options: ModelOptions,
    asked: Asked,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Serve random prompts: throughput, time to first token (TTFT), time between tokens (ITL).

    Greedy tokens are checked first: batched against one by one, and rivals against kvq. Then formats
    and rivals run in turn in every repeat. Rates are medians over repeats, latencies are over all
    requests. Fill: tokens held by the slots of live blocks.
    """
    from kvq.bench.engine import bench_engine
    from kvq.bench.engine_plot import write_engine_plot
    from kvq.commands.finished import FinishedRows
    from kvq.commands.loading import check_for
    from kvq.commands.progress import progress_bar
    from kvq.commands.results import begin, result_of

    begin(json_path, plot=plot_path)
    checked = check_for(model_options, kv)
    plan = _plan(checked.prepared, asked)
    model = checked.load()
    words = {name: value for name, value in asdict(asked).items() if value is not None}

    more: dict[str, Any] = {"model": model.description, "load": words, "refused": checked.refused}
    with FinishedRows(
        json_path, partial(result_of, device=model.weights.device, facts=more), _print
    ) as finished:
        with progress_bar("serving") as progress:
            rows = bench_engine(model, checked.kv, plan, progress=progress, keep=finished.keep)
        result = finished.end(rows)
    if asked.step_costs and any(row.get("step_costs", 0) is None for row in rows):
        echo(
            "kvq: no costs of steps: they take 32 steps at least, and a model of a known family without "
            "sliding windows and experts",
            err=True,
        )
    if plot_path is not None:
        write_engine_plot(plot_path, result)


def _plan(model: "PreparedModel", asked: Asked) -> "Plan":
    """Check the options and put them together."""
    from kvq.bench.engine import Plan
    from kvq.bench.engine_load import Load
    from kvq.bench.engine_server import Limits
    from kvq.capacity.draws import parse_lengths
    from kvq.engine.build import check_cache
    from kvq.engine.intake import as_priority
    from kvq.errors import ConfigError

    check_cache(model)
    if asked.concurrency is not None and asked.rate != "inf":
        raise ConfigError("--rate and --concurrency both say when requests come; give one of them")
    try:
        per_second = float(asked.rate)
        users = tuple(int(n) for n in asked.concurrency.split(",")) if asked.concurrency is not None else ()
    except ValueError as error:
        raise ConfigError(
            f"--rate takes a number or inf, --concurrency whole numbers with commas between; {error}"
        ) from error
    load = Load(
        num_requests=asked.requests,
        input_lengths=parse_lengths(asked.input_len, "--input-len"),
        output_lengths=parse_lengths(asked.output_len, "--output-len"),
        vocab_size=model.geometry.vocab_size,
        max_context=model.max_context,
        rate=per_second,
        shared_prefix=asked.shared_prefix,
        priority=as_priority(
            asked.priority or ("batch" if not users and asked.rate == "inf" else "interactive")
        ),
        seed=asked.seed,
    )
    limits = Limits(
        kv_memory=asked.kv_memory,
        num_blocks=asked.blocks,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        prefix_caching=asked.prefix_caching,
    )
    return Plan(
        load=load,
        limits=limits,
        users=users,
        rivals=() if asked.rivals == "none" else tuple(name.strip() for name in asked.rivals.split(",")),
        repeats=asked.repeats,
        step_costs=asked.step_costs,
        slo_ttft_ms=asked.slo_ttft_ms,
        slo_itl_ms=asked.slo_itl_ms,
    )


_COLUMNS = {
    "name": ("name", ""),
    "kv": ("kv", ""),
    "concurrency": ("at a time", "g"),
    "output_tokens_per_s": ("output tok/s", ",.1f"),
    "output_tokens_per_s_p10": ("p10", ",.1f"),
    "output_tokens_per_s_p90": ("p90", ",.1f"),
    "total_tokens_per_s": ("total tok/s", ",.1f"),
    "ttft_ms_p50": ("TTFT ms p50", ",.1f"),
    "ttft_ms_p99": ("p99", ",.1f"),
    "itl_ms_p50": ("ITL ms p50", ",.1f"),
    "itl_ms_p99": ("p99", ",.1f"),
    "preemptions": ("preempted", "g"),
    "prefix_hit_rate": ("prefix hits", ".1%"),
    "peak_blocks": ("peak blocks", ","),
    "pool_utilization": ("fill", ".1%"),
    "notes": ("", ""),
}


def _print(result: dict[str, Any]) -> None:
    from kvq.commands.tables import print_columns

    echo(f"model   {result['model']}")
    echo(f"device  {result['device']}")
    print_columns([row | {"notes": _notes(row)} for row in result["rows"]], _COLUMNS, width=200)
    for row in result["rows"]:
        if "reason" in row:
            echo(f"{row['name']} can't run here: {row['reason']}")
    echo(_check_line(result["rows"]))


def _notes(row: dict[str, Any]) -> str:
    notes = [row["attention"]] if "attention" in row else []
    notes += ["saturated"] if row.get("is_saturation") else []
    notes += ["best within SLO"] if row.get("is_best_within_slo") else []
    return ", ".join(notes)


def _check_line(rows: list[dict[str, Any]]) -> str:
    """What the check before timing found, in one line."""
    checked = {(row["name"], row["kv"]): row for row in rows if "check_requests" in row}.values()
    total, equal = (sum(row[key] for row in checked) for key in ("check_requests", "check_equal"))
    line = f"checked {equal} of {total} requests give the tokens that kvq gives one by one"
    if equal < total:
        gap = max(row["check_largest_gap"] or 0.0 for row in checked)
        line += f"; the others first differ between two tokens at most {gap:.2g} apart in log-probability"
    return line
