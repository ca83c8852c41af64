"""`kvq bench engine`: the engine under load, compared with transformers' own generation."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvq.commands.bench.options import TrafficOptions
from kvq.commands.shared.declare import SectionedCommand, gathered, option, picked
from kvq.commands.shared.options import ModelOptions, json_option, kv_option, model_options
from kvq.commands.shared.param_types import AT_LEAST_1, POSITIVE, SIZE, TO_WRITE, TokenCount
from kvq.commands.shared.results import FinishedRows, begin, result_of
from kvq.commands.shared.terminal import echo, print_columns, print_origin
from kvq.errors import ConfigError
from kvq.evals.report.page import columns_of

if TYPE_CHECKING:
    from kvq.bench.engine.engine import EnginePlan
    from kvq.models.loading.prepared import PreparedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class _EngineOptions:
    requests: int = option(32, type=click.IntRange(1, 100_000))
    concurrency: str | None = option(
        None,
        "Users at a time instead of --rate; a list such as 1,4,8,16,32 ends where throughput stops growing.",
    )
    priority: str | None = option(
        None,
        "interactive keeps prefills from delaying the tokens of others.  [default: batch if all requests "
        "arrive at once]",
        type=click.Choice(["interactive", "batch"]),
    )
    kv_memory: str | None = option(
        None, "Size of the KV pool, such as 512MiB.  [default: all that the load needs]", type=SIZE
    )
    blocks: int | None = option(None, "Size of the KV pool in blocks per layer group.", type=AT_LEAST_1)
    max_num_seqs: int = option(128, type=click.IntRange(1, 65_536))
    max_num_batched_tokens: int = option(2048, type=TokenCount(1, 1 << 20))
    prefix_caching: bool = option(True)
    rivals: str = option("none", "none, hf-static, hf-continuous, or both with a comma between.")
    slo_ttft_ms: float | None = option(None, "Goal for the 99th percentile.", type=POSITIVE)
    slo_itl_ms: float | None = option(None, "Goal for the 99th percentile.", type=POSITIVE)
    repeats: int = option(3, type=click.IntRange(1, 1000))
    step_costs: bool = option(
        False, "Also measure the cost of the parts of steps, for --calibrate of kvq plan and kvq simulate."
    )


@click.command(name="engine", cls=SectionedCommand)
@kv_option("bf16,int4", many=True)
@model_options
@gathered(TrafficOptions, "traffic")
@gathered(_EngineOptions, "options")
@json_option
@click.option("--plot", "plot_path", type=TO_WRITE, help="Draw latency over throughput (.svg, .png).")
def engine(
    kv: list[str],
    model_options: ModelOptions,
    traffic: TrafficOptions,
    options: _EngineOptions,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Serve random prompts, and measure throughput, time to first token (TTFT) and time between tokens (ITL).

    Greedy tokens are checked first: batched requests against single requests, and rivals against kvq. In
    every repeat, formats and rivals run one after another. Rates are medians over repeats, and latencies
    cover all requests. Fill is the share of slots in live blocks that contain tokens.
    """
    from kvq.bench.engine.engine import bench_engine
    from kvq.bench.figures import engine_figure
    from kvq.commands.shared.loading import check_for
    from kvq.evals.report.figure import write_figure

    begin(json_path, plot=plot_path)
    checked = check_for(model_options, kv)
    plan = _plan(checked.prepared, traffic, options)
    model = checked.load()
    load = {name: value for name, value in (asdict(traffic) | asdict(options)).items() if value is not None}
    facts = {"model": model.description, "load": load, "refused": checked.refused}
    finished = FinishedRows(json_path, partial(result_of, device=model.weights.device, facts=facts), _print)
    result = finished.measure("serving", partial(bench_engine, model, checked.kv, plan))
    if options.step_costs and any(row.get("step_costs", 0) is None for row in result["rows"]):
        echo(
            "kvq: no costs of steps: they need 32 steps at least, and a model of a known family without "
            "sliding windows and experts",
            err=True,
        )
    if plot_path is not None:
        write_figure(plot_path, engine_figure, result)


def _plan(model: "PreparedModel", traffic: TrafficOptions, options: _EngineOptions) -> "EnginePlan":
    from kvq.bench.engine.engine import EnginePlan
    from kvq.engine import EngineConfig
    from kvq.engine.build import check_cache
    from kvq.engine.requests.request_options import as_priority

    check_cache(model)
    make = traffic.make(options.requests, options.concurrency)
    try:
        users = (
            tuple(int(n) for n in options.concurrency.split(",")) if options.concurrency is not None else ()
        )
    except ValueError as error:
        raise ConfigError(f"--concurrency takes whole numbers with commas between; {error}") from error
    at_once = not users and traffic.rate == "inf"
    limits = ("kv_memory", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")
    return EnginePlan(
        load=make(
            vocab_size=model.geometry.vocab_size,
            max_context=model.max_context,
            priority=as_priority(options.priority or ("batch" if at_once else "interactive")),
        ),
        config=EngineConfig(num_blocks=options.blocks, **picked(options, *limits)),
        users=users,
        rivals=() if options.rivals == "none" else tuple(name.strip() for name in options.rivals.split(",")),
        **picked(options, "repeats", "step_costs", "slo_ttft_ms", "slo_itl_ms"),
    )


def _print(result: dict[str, Any]) -> None:
    print_origin(result)
    noted = [row | {"notes": _notes(row)} for row in result["rows"]]
    print_columns(noted, columns_of("bench engine"), width=200)
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
    checked = {(row["name"], row["kv"]): row for row in rows if "check_requests" in row}.values()
    total, equal = (sum(row[key] for row in checked) for key in ("check_requests", "check_equal"))
    line = f"checked {equal} of {total} requests give the tokens that kvq gives one by one"
    if equal < total:
        gap = max(row["check_largest_gap"] or 0.0 for row in checked)
        line += f"; the others first differ between two tokens at most {gap:.2g} apart in log-probability"
    return line
